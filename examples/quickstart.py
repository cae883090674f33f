"""Quick start: capture a step with one region, and replay it with other data and lengths."""

import torch

import devgraph as dg

cache = torch.randn(1024, 64)


@dg.region(host_args=("kv_len",), mutates=("out",))  # depends on a host value
def attention(query, out, *, kv_len):
    out.copy_(torch.softmax(query @ cache[:kv_len].T, dim=-1) @ cache[:kv_len])


def step(x, *, kv_len):
    out = torch.empty_like(x)
    attention(torch.tanh(x), out, kv_len=kv_len)
    return x + out


x = torch.randn(8, 64)
captured = dg.capture(step, x, backend="cpu", policy="full", host_args={"kv_len": 512})
x.normal_()  # new data goes into the bound tensor
result = captured.replay(kv_len=777)
print("replay equals eager:", torch.equal(result, step(x, kv_len=777)))
print(captured.prove(host_args=[{"kv_len": length} for length in (1, 512, 1024)]))
print(captured.explain())
