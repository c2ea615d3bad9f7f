"""`alibi_attention` and the backends that compute it (PyTorch). What users call is here; the folders, in the order of imports:

call/         arguments become a description, `spec.py`, which has the legend of shapes; start there
certificate/  which keys are too far to matter
operators/    kernels become torch operators
backends/     one file or folder per way to compute a call; `reference.py` is the definition
run/          picks a backend, and splits calls into parts
"""
