"""Looking into trained models: the commands of `alibi heads`. `loading.py` opens a model.

summary    where every head attends, and how much of its certified reach carries weight
weights    which tokens the heads of a layer attend to (in `summary.py`)
rollout    attention accumulated over the layers
reach      the certified reach of every head and the true one, in fp64
"""
