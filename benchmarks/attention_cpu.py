"""What does MSA cost on a CPU, against dense attention of the same heads?

    python benchmarks/attention_cpu.py [--repeats 5] [--lengths 4096 8192 16384] [--dense-length 8192] [--out results/attention_cpu]

1. Long sequences, B1 N8 K2 H64 C64 R8: time and extra memory of sparse_attention forward + backward against
   jax.nn.dot_product_attention, and whether the cost of a token stays flat as the sequence grows.
2. A training step of configs/text_only.py (D128, 4 layers, N4 K2 H32 I32 C16 R8) on 8 rows of 512 tokens, against the same model with
   dense attention: loss and all gradients, the index branch and its KL included.

Results are compared with the reference first; a run that differs stops. Every printed row is appended to <out>/<commit>.jsonl with
commit, device and versions. Times are the best of the repeats, on the wall clock and of the processor (the second is the steadier one
on a shared machine); GFLOP/s stand beside those of a large matrix product ("roofline").
"""

import argparse
import dataclasses
import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from msa_jax.config import Experiment, load
from msa_jax.data.batch import Batch
from msa_jax.model.hybrid import HybridTransformer
from msa_jax.train.loss import batch_totals, loss_fn
from pallas_kernels.block_select.api import block_select
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.testing import Case, assert_close

CONFIG = Path(__file__).parents[1] / "configs" / "text_only.py"
LONG = Case("long", T=0, S=0, B=1, K=2, G=4, H=64, width=64, I=64, C=64, R=8)
STEP_ROWS, STEP_TOKENS = 8, 512
LIMITS = {
    "time against dense": 0.3,
    "extra memory against dense": 0.1,
    "cost of a token, longest against shortest": 1.3,
    "training step against dense": 1.5,
}


def sizes(case: Case) -> str:
    return f"B{case.B} N{case.K * case.G} K{case.K} H{case.H} I{case.I} C{case.C} R{case.R}"


class Cost(NamedTuple):
    """Best wall-clock and processor seconds of a call, and the memory it needs beside arguments and results."""

    seconds: float
    cpu_seconds: float
    extra_bytes: int


class Bench:
    """Measures, prints and records; `facts` go into every row."""

    def __init__(self, out: Path, repeats: int) -> None:
        self.repeats = repeats
        self.facts = facts()
        self.path = out / f"{self.facts['commit']}.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        self.roofline = self.matmul_gflops()

    def record(self, name: str, **values: object) -> None:
        line = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items())
        print(f"{name}: {line}", flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"name": name, **values, "roofline_gflops": self.roofline, **self.facts}) + "\n")

    def matmul_gflops(self) -> float:
        a = jnp.ones((2048, 2048))
        seconds = self.measure({"matmul": (jnp.matmul, (a, a))})["matmul"].seconds
        print(f"roofline: float32 matrix product 2048^3, {2 * 2048**3 / seconds / 1e9:.0f} GFLOP/s", flush=True)
        return 2 * 2048**3 / seconds / 1e9

    def measure(self, calls: dict[str, tuple[Callable, tuple]]) -> dict[str, Cost]:
        """Cost of each compiled function; the repeats go round, so that a disturbance does not fall on one function alone."""
        compiled = {name: jax.jit(function).lower(*arrays).compile() for name, (function, arrays) in calls.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for repeat in range(self.repeats + 1):
            for name, (_, arrays) in calls.items():
                start, start_cpu = time.perf_counter(), time.process_time()
                jax.block_until_ready(compiled[name](*arrays))
                if repeat:  # the first one warms up
                    times[name].append((time.perf_counter() - start, time.process_time() - start_cpu))
        best = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
        return {name: Cost(*best[name], compiled[name].memory_analysis().temp_size_in_bytes) for name in calls}

    def compare(self, name: str, value: float) -> None:
        self.record(name, ratio=value, limit=LIMITS[name], verdict="met" if value <= LIMITS[name] else "MISSED")


def facts() -> dict[str, object]:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../pallas_kernels", "../msa_jax", "attention_cpu.py")
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") + ("-changed" if changed else ""),
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def inputs(case: Case) -> dict[str, jax.Array]:
    random = case.random()
    shapes = {
        "iq": (case.B, case.T, case.K, case.I),
        "ik": (case.B, case.S, case.I),
        "q": (case.B, case.T, case.K * case.G, case.H),
        "k": (case.B, case.S, case.K, case.H),
        "v": (case.B, case.S, case.K, case.width),
    }
    return {name: jnp.asarray(case.normal(random, *shape)) for name, shape in shapes.items()}


def dense_gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    return jax.grad(lambda *qkv: jnp.sum(jax.nn.dot_product_attention(*qkv, is_causal=True) ** 2), argnums=(0, 1, 2))(q, k, v)


def sparse_gradients(case: Case, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, implementation: str = "xla") -> tuple:
    def loss(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(sparse_attention(*qkv, ids, block_size=case.C, implementation=implementation)[0] ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def step_gradients(experiment: Experiment, pattern: str) -> tuple[Callable, tuple]:
    """The gradient of a training step with layers of `pattern`, and its arguments: parameters and one batch."""
    config = dataclasses.replace(experiment.model, pattern=pattern)
    graphdef, params = nnx.split(HybridTransformer(config, rngs=nnx.Rngs(0)))
    shape = STEP_ROWS, STEP_TOKENS
    zeros, ones = np.zeros(shape, np.int32), np.ones(shape, np.int32)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)
    batch = Batch(tokens, ones, zeros + np.arange(STEP_TOKENS, dtype=np.int32), ones.astype(np.float32), zeros, zeros - 1, None)

    def loss(params: nnx.State, batch: Batch) -> jax.Array:
        parts = {"phase": "sparse", "kl_weight": experiment.train.kl_weight, "num_sources": 1}
        return loss_fn(params, batch, graphdef=graphdef, totals=batch_totals(batch), **parts)[0]

    return jax.grad(loss), (params, batch)


def select(case: Case, arrays: dict[str, jax.Array], implementation: str = "xla") -> jax.Array:
    run = jax.jit(lambda iq, ik: block_select(iq, ik, block_size=case.C, num_blocks=case.R, implementation=implementation).ids)
    return run(arrays["iq"], arrays["ik"])


def check_parity() -> None:
    """xla against the reference where blocks are chosen, and against dense attention where all are kept."""
    for num_tokens in (LONG.R * LONG.C, 2176):
        case = LONG._replace(T=num_tokens, S=num_tokens)
        arrays = inputs(case)
        qkv = (arrays["q"], arrays["k"], arrays["v"])
        ids = select(case, arrays)
        names = ("dq", "dk", "dv")
        got = dict(zip(names, jax.jit(lambda *qkv: sparse_gradients(case, *qkv, ids))(*qkv), strict=True))
        if num_tokens == LONG.R * LONG.C:
            want = dict(zip(names, jax.jit(dense_gradients)(*qkv), strict=True))
        else:
            differing = np.mean(np.asarray(ids != select(case, arrays, "reference")).any(axis=-1))
            assert differing < 1e-3, f"block_select differs from the reference in {differing:.1%} of the rows: more than near ties"
            want = dict(zip(names, jax.jit(lambda *qkv: sparse_gradients(case, *qkv, ids, "reference"))(*qkv), strict=True))
        assert_close(got, want, 5e-6)


def long_sequences(bench: Bench, lengths: list[int], dense_length: int) -> None:
    all_lengths, calls, flops = sorted({*lengths, dense_length}), {}, {}
    for num_tokens in all_lengths:
        case = LONG._replace(T=num_tokens, S=num_tokens)
        arrays = inputs(case)
        qkv, index = (arrays["q"], arrays["k"], arrays["v"]), (arrays["iq"], arrays["ik"])
        ids = select(case, arrays)
        flops[num_tokens] = 2 * (4 * case.H + 3 * case.width) * case.G * int((ids >= 0).sum()) * case.C
        calls[f"sparse {num_tokens}"] = (functools.partial(sparse_gradients, case), (*qkv, ids))
        calls[f"select {num_tokens}"] = (lambda iq, ik, case=case: select(case, {"iq": iq, "ik": ik}), index)
        if num_tokens == dense_length:
            dense = (dense_gradients, qkv)
    # Apart: the gigabytes that dense attention gives back leave the next call to fetch its pages anew.
    costs = bench.measure(calls) | bench.measure({"dense": dense})
    for num_tokens in all_lengths:
        sparse = costs[f"sparse {num_tokens}"]
        bench.record(
            f"sparse_attention forward + backward, T={num_tokens}", sizes=sizes(LONG), **sparse._asdict(),
            microseconds_per_token=1e6 * sparse.seconds / num_tokens, gflops=flops[num_tokens] / sparse.seconds / 1e9,
        )  # fmt: skip
        bench.record(f"block_select, T={num_tokens}", sizes=sizes(LONG), **costs[f"select {num_tokens}"]._asdict())
    bench.record(f"dense forward + backward, T={dense_length}", sizes=sizes(LONG), **costs["dense"]._asdict())
    sparse = costs[f"sparse {dense_length}"]
    bench.compare("time against dense", sparse.seconds / costs["dense"].seconds)
    bench.compare("extra memory against dense", sparse.extra_bytes / costs["dense"].extra_bytes)
    per_token = [costs[f"sparse {num_tokens}"].seconds / num_tokens for num_tokens in lengths]
    bench.compare("cost of a token, longest against shortest", max(per_token) / min(per_token))


def training_step(bench: Bench) -> None:
    experiment = load(CONFIG)
    costs = bench.measure({name: step_gradients(experiment, pattern) for name, pattern in (("MSA", "M"), ("dense", "D"))})
    for name, cost in costs.items():
        bench.record(f"training step, {name}", sizes=f"B{STEP_ROWS} T{STEP_TOKENS}", **cost._asdict())
    bench.compare("training step against dense", costs["MSA"].seconds / costs["dense"].seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="of the flatness check")
    parser.add_argument("--dense-length", type=int, default=8192, help="where dense attention is measured (8192 needs 9 GB)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "attention_cpu")
    arguments = parser.parse_args()
    check_parity()
    bench = Bench(arguments.out, arguments.repeats)
    training_step(bench)
    long_sequences(bench, arguments.lengths, arguments.dense_length)


if __name__ == "__main__":
    main()
