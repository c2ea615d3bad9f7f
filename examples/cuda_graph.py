"""Can a CUDA graph replay training and decoding steps, so that the host launches one graph in place of every kernel?

python examples/cuda_graph.py
"""

import torch

from alibi_attn import ALiBiTransformerBlock, KVCache

HEADS, WIDTH, TOKENS = 8, 512, 100


def captured(step):
    """The graph of a step and its output, which every replay overwrites; the steps before it compile the kernels."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        step(), step(), step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        return graph, step()


def main():
    torch.manual_seed(0)
    model, x = ALiBiTransformerBlock(WIDTH, HEADS), torch.randn(2, 256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph, loss = captured(train)
    losses = [(graph.replay(), float(loss))[1] for _ in range(10)]  # copy each batch into x before
    print(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}")

    # The cache holds its length in a tensor, so each replay writes and attends one token further.
    token, text, error = torch.zeros(1, 1, WIDTH), torch.randn(1, TOKENS, WIDTH), torch.zeros(())
    cache = KVCache(capacity=1024)
    with torch.no_grad():
        expected, (graph, output) = model(text), captured(lambda: model(token, cache=cache))
        cache.crop(0)  # forgets the steps before
        for i in range(TOKENS):
            token.copy_(text[:, i : i + 1]), graph.replay()
            error = torch.maximum(error, (output - expected[:, i : i + 1]).abs().max())
    print(f"decoded tokens differ from one pass by {error:.0e}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        with torch.device("cuda"):
            main()
    else:
        print("skipped: a CUDA graph needs a CUDA device, and there is none")
