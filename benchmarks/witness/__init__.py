"""Burns a running timecode into clips, and reads it in the frames that the pipeline hands to a model."""
