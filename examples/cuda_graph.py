"""Can a CUDA graph replay training and decoding steps, so that the host launches one graph in place of every kernel?

python examples/cuda_graph.py
"""

import torch

from alibi_attn import ALiBiTransformerBlock, alibi_attention

HEADS, SIZE, CAPACITY, TOKENS = 8, 64, 1024, 100


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
    model, x = ALiBiTransformerBlock(HEADS * SIZE, HEADS), torch.randn(2, 256, HEADS * SIZE)
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

    # Keys and values have a fixed capacity. Those after the position are in the future, whatever they hold.
    new, kept = torch.zeros(3, 1, HEADS, 1, SIZE), torch.zeros(2, 1, HEADS, CAPACITY, SIZE)
    texts, position = torch.randn(3, 1, HEADS, TOKENS, SIZE), torch.zeros(1, dtype=torch.int64)
    expected, error = alibi_attention(*texts), torch.zeros(())

    def decode():
        kept.index_copy_(3, position, new[1:])
        return alibi_attention(new[0], *kept, query_offset=position)

    graph, output = captured(decode)
    for i in range(TOKENS):
        new.copy_(texts[..., i : i + 1, :]), position.fill_(i), graph.replay()
        error = torch.maximum(error, (output - expected[:, :, i : i + 1]).abs().max())
    print(f"decoded tokens differ from one pass by {error:.0e}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        with torch.device("cuda"):
            main()
    else:
        print("skipped: a CUDA graph needs a CUDA device, and there is none")
