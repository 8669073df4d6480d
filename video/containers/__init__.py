"""What a container says of itself, held against its bytes."""
