"""Keys and values of decoded models: `cache.py`, and its folders on disk, `cache_folder.py`."""
