"""Links between the processes of the application, and what they share. Knows nothing of Ray."""
