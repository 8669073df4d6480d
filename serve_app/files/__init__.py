"""Files and batches of OpenAI's API, in a folder of the operator's, which servers may share."""
