"""Opens media from files, URLs and data URIs, as far as that is allowed."""
