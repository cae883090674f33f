"""Prefill on one backend and decode on another, with two processes and one mode string.

    torchrun --standalone --nproc-per-node 2 examples/mixed_cluster.py --backends cpu cpu --check
    torchrun --standalone --nproc-per-node 2 examples/mixed_cluster.py --backends cpu cuda
    python examples/mixed_cluster.py --backends cpu cpu --ray      # pip install ".[ray]"

Rank 0 runs prefill and hands over each request after its first token. Rank 1 runs the decode steps.
A scheduler submits eight requests over time, aborts one of them, and prints the tokens as they are
generated. Each process asserts that its policy and buckets equal those of the cluster's plan. On
Ascend, add ``--dtype float16``, because its fused attention does not support float32.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import devgraph as dg
from devgraph.integrations.transformers import Engine, TorchTransport, load

MODE = {
    "decode": {"policy": "full", "buckets": [1, 2, 4, 8]},
    "prefill": {"policy": "breakable", "buckets": [16, 64]},
    "backends": {"npu": {"prefill": "full"}},
}
ROLES = ("prefill", "decode")
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there was",
    "Water boils at",
    "The three primary colors are red,",
    "A list of planets, from the closest to the farthest from the sun: Mercury,",
    "To make bread you need",
    "In the morning the old man opened the door of his house and saw that",
    "One, two, three,",
)
SIZES: dict[str, int] = {"max_requests": 8, "max_len": 256, "max_step_tokens": 64}


def small_model() -> PreTrainedModel:
    """Return a random model of two layers whose greedy tokens do not depend on rounding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Node:
    """The engine and the transport of one process, which exchanges JSON messages through the store.

    Args:
        role: "prefill" or "decode".
        args: the parsed command line.
        store: a client of the store that all processes share.
    """

    def __init__(self, role: str, args: argparse.Namespace, store: Any) -> None:
        self.role, self.layerwise, self._store = role, args.layerwise, store
        backend = dg.get_backend(args.backends[ROLES.index(role)])
        dtype = getattr(torch, args.dtype)
        if args.model:
            model, tokenizer = load(args.model, dtype=dtype, device=backend.device)
        else:
            model, tokenizer = small_model().to(backend.device, dtype), None
        config = args.config
        self.engine = Engine(
            model, tokenizer, config=config, backend=backend, layerwise=args.layerwise, **SIZES
        )
        # By default, the engine captures a bucket after its second batch.
        getattr(self.engine, role).capture(everything=True)
        self.check_plan(config, args.backends)
        self.transport = TorchTransport()

    def check_plan(self, config: dg.DeviceGraphConfig, backends: Sequence[str]) -> None:
        """Print the plan of the cluster for this node, and assert that the engine follows it."""
        groups = [
            {"name": role, "role": role, "backend": backend}
            for role, backend in zip(ROLES, backends, strict=True)
        ]
        plan = dg.plan_cluster(config, {"groups": groups})[ROLES.index(self.role)]
        planned = plan.resolution.effective.phase(self.role)
        runner = getattr(self.engine, self.role)
        buckets = sorted(bucket.bucket for bucket in runner.stats().buckets)
        print(f"{self.role} on {plan.group.backend}: {runner.effective_policy}, buckets {buckets}")
        assert runner.effective_policy in (planned.policy, "emulated"), planned
        assert planned.buckets is None or buckets == sorted(planned.buckets), planned

    def tell(self, receiver: str, **message: Any) -> None:
        self._store.queue_push(receiver, json.dumps(message))

    def messages(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Yield the messages for this node; with ``wait``, block until the first one arrives."""
        while wait or self._store.queue_len(self.role):
            yield json.loads(self._store.queue_pop(self.role))
            wait = False

    def report(self, **figures: Any) -> None:
        stats = getattr(self.engine, self.role).stats()
        self.tell(
            "scheduler", role=self.role, steps=stats.steps, graph_steps=stats.graph_steps,
            reasons=dict(stats.eager), **figures,
        )  # fmt: skip

    def close(self) -> None:
        self.transport.close()
        self.engine.close()


def prefill(node: Node) -> None:
    """Run prefill steps, and offer each request to the decode rank after its first token."""
    engine, names, requests, sent = node.engine, {}, {}, []

    def hand_over(request: int, name: int) -> None:
        handoff = engine.export(request, layerwise=node.layerwise)
        sent.append(handoff)
        node.tell("decode", request=name, offer=node.transport.offer(handoff))

    while True:
        for message in node.messages(wait=not engine.has_work):
            if "stop" in message:
                times = [handoff.progress.ready_at for handoff in sent]
                early = sum(at < layers[-1] for layers in times for at in layers)
                node.report(
                    handoffs=len(sent), bytes=sum(handoff.nbytes for handoff in sent),
                    layers=f"{early} of {sum(map(len, times))} before the prompt's step ended",
                )  # fmt: skip
                return
            if "abort" in message:
                with contextlib.suppress(dg.InputError):  # The receiver already runs the request.
                    engine.cancel(requests[message["abort"]])
                continue
            request = engine.add_request(message["prompt"], max_new_tokens=message["new"])
            names[request], requests[message["request"]] = message["request"], request
            if node.layerwise:
                hand_over(request, message["request"])
        for event in engine.step():
            name, ended = names[event.request_id], event.finish_reason
            node.tell(
                "scheduler", request=name, token=event.token, text=event.text, ended=ended,
                first=True,
            )  # fmt: skip
            if ended is None and not node.layerwise:
                hand_over(event.request_id, name)


def decode(node: Node) -> None:
    """Run decode steps, while a thread fetches handoffs."""
    engine, transport = node.engine, node.transport
    names: dict[int, int] = {}
    arriving: dict[int, tuple[str, Future[Any]]] = {}
    with ThreadPoolExecutor(1) as threads:
        while True:
            for message in node.messages(wait=not engine.has_work and not arriving):
                if "stop" in message:
                    node.report()
                    return
                if "abort" in message:
                    for request, name in list(names.items()):
                        if name == message["abort"]:
                            del names[request]
                            engine.cancel(request)
                    if message["abort"] in arriving:
                        transport.release(arriving.pop(message["abort"])[0])
                    continue
                offer = message["offer"]
                arriving[message["request"]] = offer, threads.submit(transport.fetch, offer)
            for name, (offer, fetched) in list(arriving.items()):
                if not fetched.done():
                    continue
                del arriving[name]
                try:
                    names[engine.admit(fetched.result())] = name
                    transport.release(offer)
                except dg.HandoffError as error:  # Cancelled, or rank 0 has exited.
                    print(f"request {name}: {error}", file=sys.stderr)
                    node.tell("scheduler", request=name, token=None, text="", ended="lost")
            for event in engine.step():
                name, ended = names[event.request_id], event.finish_reason
                node.tell(
                    "scheduler", request=name, token=event.token, text=event.text, ended=ended
                )
                if ended is not None:
                    del names[event.request_id]
            if arriving and not engine.has_work:
                time.sleep(1e-3)


class Scheduler:
    """A client that submits requests over time, aborts one, and collects their tokens.

    Args:
        store: a client of the store that all processes share.
        prompts: prompts of the requests, as text or token ids.
    """

    def __init__(self, store: Any, prompts: Sequence[Any]) -> None:
        self._store = store
        self.prompts = prompts
        self.lengths = [9 + 5 * (i % 4) for i in range(len(prompts))]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.ended: dict[int, str] = {}
        self.first: dict[int, float] = {}
        self.reports: dict[str, dict[str, Any]] = {}

    def _tell(self, receiver: str, **message: Any) -> None:
        self._store.queue_push(receiver, json.dumps(message))

    def _is_complete(self, name: int) -> bool:
        ended = self.ended.get(name)
        return ended in ("aborted", "lost") or (ended is not None and name in self.first)

    def run(self, abort: int) -> None:
        """Submit a request after every fifth token, and abort one after three tokens or more."""
        begun: dict[int, float] = {}
        while not all(map(self._is_complete, range(len(self.prompts)))):
            seen = sum(map(len, self.tokens))
            allowed = 2 + seen // 5 + len(self.ended)
            while len(begun) < min(len(self.prompts), allowed):
                name = len(begun)
                begun[name] = time.perf_counter()
                prompt, new = self.prompts[name], self.lengths[name]
                self._tell("prefill", request=name, prompt=prompt, new=new)
            message = json.loads(self._store.queue_pop("scheduler"))
            name, token = message["request"], message["token"]
            if self.ended.get(name) == "aborted":
                continue
            if token is not None:
                # With --layerwise, the decode rank may report a token before the prefill rank does.
                self.tokens[name].insert(0 if "first" in message else len(self.tokens[name]), token)
                if "first" in message:
                    self.first[name] = time.perf_counter() - begun[name]
                print(f"request {name}: {message['text'] or token}")
            if message["ended"]:
                self.ended[name] = message["ended"]
            elif name == abort and name in self.first and len(self.tokens[name]) >= 3:
                self.ended[name] = "aborted"
                for role in ROLES:
                    self._tell(role, abort=name)
        for role in ROLES:
            self._tell(role, stop=True)
        while len(self.reports) < len(ROLES):
            message = json.loads(self._store.queue_pop("scheduler"))
            if "role" in message:
                self.reports[message["role"]] = message

    def print_table(self) -> None:
        sent, decoding = (self.reports[role] for role in ROLES)
        first = sorted(self.first.values())
        ends = Counter(self.ended.values()).most_common()
        reasons = Counter(sent["reasons"]) + Counter(decoding["reasons"])
        rows = {
            "requests": ", ".join(f"{n} {why}" for why, n in ends),
            "handoffs": sent["handoffs"],
            "bytes": f"{sent['bytes']:,}",
            "layers sent": sent["layers"],
            "time to first token": f"{first[len(first) // 2]:.3f} s, at most {first[-1]:.3f} s",
            "decode steps in graphs": f"{decoding['graph_steps']} of {decoding['steps']}",
            "eager steps": ", ".join(f"{n} {why}" for why, n in reasons.items()) or "none",
        }
        for name, value in rows.items():
            print(f"{name:24}{value}")

    @torch.no_grad()
    def check(self, node: Node) -> bool:
        """Return whether a single process generates the same tokens, except where rounding decides.

        A difference is printed with the difference of the logits of both tokens in this process.
        """
        eager = {"decode": "disabled", "prefill": "disabled"}
        engine = node.engine
        model, tokenizer = engine.model.model, engine.tokenizer
        with Engine(model, tokenizer, backend=engine.backend, config=eager, **SIZES) as alone:
            wanted = [
                alone.generate([prompt], max_new_tokens=length)[0].token_ids
                for prompt, length in zip(self.prompts, self.lengths, strict=True)
            ]
        same = good = True
        for name, (prompt, tokens, want) in enumerate(
            zip(self.prompts, self.tokens, wanted, strict=True)
        ):
            pairs = enumerate(zip(tokens, want, strict=False))
            at = next((i for i, (token, other) in pairs if token != other), None)
            if at is None:
                good &= self.ended[name] == "aborted" or len(tokens) == len(want)
                continue
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            text = torch.tensor([[*ids, *want[:at]]], device=model.device)
            logits = model(text).logits[0, -1]
            gap = float(logits[want[at]] - logits[tokens[at]])
            step = 8 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
            same, good = False, good and gap <= step
            print(
                f"request {name}: token {at} is {tokens[at]}, in one process {want[at]}; their "
                f"logits differ by {gap:.2g}, and rounding can change them by {step:.2g}"
            )
        note = ", but only where rounding decides" if good and not same else ""
        print(f"same tokens as one process: {same and good}{note}")
        return good


def prompts_of(args: argparse.Namespace) -> list[Any]:
    if args.model:
        return list(TEXTS)
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(211, (3 + 7 * i,), generator=generator).tolist() for i in range(8)]


def serve(
    rank: int, args: argparse.Namespace, store: Any, ready: Callable[[], None] = lambda: None
) -> Node:
    """Run the loop of one rank until it is stopped; call ``ready`` before; return its node."""
    limit = datetime.timedelta(seconds=args.timeout)
    name = "gloo"
    if args.direct:
        torch.accelerator.set_device_index(rank)
        device = torch.accelerator.current_accelerator()
        name = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    node = None
    try:
        dist.init_process_group(name, store=store, rank=rank, world_size=2, timeout=limit)
        node = Node(ROLES[rank], args, dist.PrefixStore("messages", store).clone())
        ready()
        (prefill, decode)[rank](node)
    except dg.DeviceGraphError as error:
        if node is None:
            raise SystemExit(f"{ROLES[rank]}: {error}") from None
        raise
    except dist.DistError as error:
        if node is not None:
            node.close()
        raise SystemExit(
            f"{ROLES[rank]}: rank {1 - rank} or the store has ended or is silent: {error}"
        ) from error
    return node


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backends", nargs=2, metavar=("PREFILL", "DECODE"), required=True)
    parser.add_argument(
        "--model", help="a transformers model (default: a random model of two layers)"
    )
    parser.add_argument(
        "--layerwise", action="store_true", help="send each layer as soon as it is ready"
    )
    parser.add_argument(
        "--direct", action="store_true", help="send tensors from device to device on one host"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for a rank")
    parser.add_argument(
        "--check", action="store_true", help="compare the tokens with an eager run in one process"
    )
    parser.add_argument("--ray", action="store_true", help="run both ranks as Ray actors")
    dg.add_cli_args(parser)
    args = parser.parse_args()
    if not args.ray and os.environ.get("WORLD_SIZE") != "2":
        parser.error("start two ranks with torchrun --nproc-per-node 2, or pass --ray")
    if args.timeout <= 0:
        parser.error(f"--timeout must be positive, got {args.timeout:g}")
    if args.direct and torch.accelerator.device_count() < 2:
        parser.error("--direct needs two devices on this host")
    config = dg.DeviceGraphConfig.from_args(args, parser=parser)
    args.config = config if config.to_dict() else dg.DeviceGraphConfig.from_dict(MODE)
    return args


def main(args: argparse.Namespace) -> int:
    """Run this rank, and on rank 1 also the scheduler; return the exit status."""
    rank = int(os.environ["RANK"])
    limit = datetime.timedelta(seconds=args.timeout)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(*address, is_master=hosted, timeout=limit)
    good = True
    if rank == 0:
        node = serve(0, args, store)
    else:
        scheduler = Scheduler(dist.PrefixStore("messages", store).clone(), prompts_of(args))
        thread = threading.Thread(target=scheduler.run, args=[2], daemon=True)
        node = serve(1, args, store, thread.start)
        thread.join()
        scheduler.print_table()
        good = "lost" not in scheduler.ended.values()
        good &= not args.check or scheduler.check(node)
    dist.barrier()
    node.close()
    dist.destroy_process_group()
    return 0 if good else 1


def main_ray(args: argparse.Namespace) -> int:
    """Run both ranks as Ray actors, and the scheduler in this process."""
    import ray

    ray.init(log_to_driver=True)
    limit = datetime.timedelta(seconds=args.timeout)
    address = ray.util.get_node_ip_address()
    store = dist.TCPStore(address, 0, is_master=True, timeout=limit)

    @ray.remote
    class Rank:
        def run(self, rank: int, folder: str, port: int, args: argparse.Namespace) -> None:
            sys.path.insert(0, folder)  # Ray would pickle the functions of a script.
            module = importlib.import_module("mixed_cluster")
            store = dist.TCPStore(address, port, timeout=limit)
            node = module.serve(rank, args, store, lambda: store.set(f"ready {rank}", ""))
            dist.barrier()
            node.close()

    folder = os.path.dirname(os.path.abspath(__file__))
    ranks = [Rank.remote() for _ in range(2)]
    done = [actor.run.remote(rank, folder, store.port, args) for rank, actor in enumerate(ranks)]
    scheduler = Scheduler(dist.PrefixStore("messages", store).clone(), prompts_of(args))
    while not store.check([f"ready {rank}" for rank in range(2)]):
        ray.get(ray.wait(done, timeout=0.1)[0])  # raises the error of a rank
    scheduler.run(abort=2)
    ray.get(done)
    scheduler.print_table()
    return 0


if __name__ == "__main__":
    arguments = parse()
    sys.exit(main_ray(arguments) if arguments.ray else main(arguments))
