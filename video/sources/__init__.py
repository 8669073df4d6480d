"""Where media come from: files, URLs and data URIs, and what is allowed."""
