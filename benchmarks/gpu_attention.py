"""How fast are the GPU kernels of MSA, stage by stage, against dense attention in the same process?

    python -m benchmarks.gpu_attention --lengths 8192 32768 131072 --out results/kernels/attention.jsonl

One row a measurement, printed and appended as JSON: milliseconds, TFLOP/s, percent of the stated limit, and ratios against dense cuDNN.
FLOPs: forward 4 N H and backward 10 N H a (query, key) pair of the selected blocks, masked pairs of the local block counted; dense
attention counts causal pairs. Limits on one H200: 790 TFLOP/s (a large bf16 product), 4.3 TB/s (a large copy, read + write).

Selections: "uniform" (the own block and R - 1 random earlier ones), "clustered" (75% of those common to 8 neighbouring queries), "sink"
(uniform, but every query keeps block 0), and "trained" where --ids names a .npz file with ids [K, T, R]. Nothing is printed when the
parity check against the reference fails.
"""

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.attention_stages import ONE_CHUNK, stage_rows
from pallas_kernels.block_select.api import block_select
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.index_kl.api import index_kl, sparse_attention_and_index_kl
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.testing import error_ratio

TFLOPS_LIMIT, BYTES_LIMIT = 790.0, 4.3e12
PARITY_LIMIT = 5e-3
DENSE_UP_TO = 131072  # above, one timed call of cuDNN's forward alone
N, K, H, C, R = 64, 4, 128, 128, 16  # MiniMax-M3
MOSAIC = {"block_size": C, "implementation": "mosaic_gpu"}


class Inputs(NamedTuple):
    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    iq_BTKI: jax.Array
    ik_BSI: jax.Array


def inputs(T: int) -> Inputs:
    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, K, H), (1, T, H)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return Inputs(*(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)))


@functools.partial(jax.jit, static_argnames=("T", "share", "sink", "neighbours"))
def selection(key: jax.Array, *, T: int, share: float = 0.0, sink: bool = False, neighbours: int = 8) -> jax.Array:
    """ids [1, K, T, R]: R - 1 distinct random earlier blocks, `share` of them common to neighbouring queries, and the own block last."""
    blocks, rows = T // C, min(T, 4096)
    common = round((R - 1) * share)

    def some(i):
        own = (i * rows + jnp.arange(rows)) // C
        alone, together = jax.random.split(jax.random.fold_in(key, i))
        score = jax.random.uniform(alone, (K, rows, blocks))
        score = score.at[..., 0].add(2.0 if sink else 0.0)
        if common:
            shared = jax.random.uniform(together, (K, rows // neighbours, blocks))
            shared = jnp.where(jnp.arange(blocks) < own.reshape(-1, neighbours)[:, :1], shared, -1.0)
            least = lax.top_k(shared, min(common, blocks))[0][..., -1:]
            score = score + jnp.repeat(shared >= least, neighbours, axis=1)
        score = jnp.where(jnp.arange(blocks) < own[:, None], score, -1.0)
        best, ids = lax.top_k(score, min(R - 1, blocks))
        ids = jnp.pad(jnp.where(best >= 0, ids, -1), ((0, 0), (0, 0), (0, R - 1 - ids.shape[-1])), constant_values=-1)
        return jnp.concatenate([ids, jnp.broadcast_to(own[:, None], (K, rows, 1))], axis=-1).astype(jnp.int32)

    return jnp.moveaxis(lax.map(some, jnp.arange(T // rows)), 0, 1).reshape(1, K, T, R)


def milliseconds(f: Callable, *args, repeats: int = 10, rounds: int = 3) -> float:
    """Median over `rounds` of the mean of `repeats` calls, after a warm-up call; every result is dropped before the next round.

    One repeat means one timed call of the compiled function, without a warm-up: it is for calls of many seconds.
    """
    if repeats == 1:
        f, rounds = f.lower(*args).compile(), 1
    else:
        jax.block_until_ready(f(*args))
    means = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            result = f(*args)
        jax.block_until_ready(result)
        means.append((time.perf_counter() - start) / repeats)
        del result
    return statistics.median(means) * 1e3


def with_gradients(f: Callable) -> Callable:
    """f and its gradients for a cotangent of ones; none for `constants`, which are arguments so that XLA does not fold them."""

    def both(*arrays, constants=()):
        out, pullback = jax.vjp(lambda *arrays: f(*arrays, *constants), *arrays)
        return out, pullback(jax.tree.map(jnp.ones_like, out))

    return jax.jit(both)


def check_parity(T: int = 1024) -> dict[str, float]:
    """Error ratios of results and all gradients of attention and index loss against the float32 reference.

    Raises SystemExit where one exceeds the limit: times of wrong kernels are worth nothing.
    """
    x, ids, probe = inputs(T), selection(jax.random.key(1), T=T, share=0.5), jnp.float32(0)

    def train(q, k, v, iq, ik, probe, ids, *, implementation):
        return sparse_attention_and_index_kl(q, k, v, iq, ik, ids, block_size=C, probe=probe, implementation=implementation)

    found = with_gradients(functools.partial(train, implementation="mosaic_gpu"))(*x, probe, constants=(ids,))
    wide = (y.astype(jnp.float32) for y in x)
    expected = with_gradients(functools.partial(train, implementation="reference"))(*wide, probe, constants=(ids,))
    names = ("out", "lse", "kl", "dq", "dk", "dv", "diq", "dik", "value of kl")
    pairs = zip(names, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    errors = {name: error_ratio(a, b) for name, a, b in pairs}
    if not all(error <= PARITY_LIMIT for error in errors.values()):
        raise SystemExit(f"parity failed, limit {PARITY_LIMIT}: {errors}")
    return errors


def stage(name: str, ms: float, *, flops: float = 0.0, bytes_moved: float = 0.0, **more) -> dict:
    """One row; its limit is the slower of the two floors."""
    floor_ms = max(flops / TFLOPS_LIMIT / 1e9, bytes_moved / BYTES_LIMIT * 1e3)
    row = {"stage": name, "ms": round(ms, 3)}
    if flops:
        row["tflops"] = round(flops / ms / 1e9, 1)
    if bytes_moved:
        row["gb_per_s"] = round(bytes_moved / ms / 1e6)
    return {**row, "percent_of_limit": round(100 * floor_ms / ms, 1), **more} if floor_ms else {**row, **more}


def measured(name: str, f: Callable, *args, repeats: int, **counts) -> Iterator[dict]:
    """The row of f, or a row with the reason where no kernel serves it or the device refuses."""
    try:
        yield stage(name, milliseconds(f, *args, repeats=repeats), **counts)
    except (Unsupported, jax.errors.JaxRuntimeError, ValueError) as error:
        yield {"stage": name, "not_measured": str(error)[:300]}


def sparse_rows(x: Inputs, ids: jax.Array, *, repeats: int) -> Iterator[dict]:
    """select, forward, forward + backward, and the index loss, alone and together with attention."""
    T = ids.shape[2]
    pairs = int((ids >= 0).sum()) * C * (N // K)
    forward_flops, index_flops = 4 * H * pairs, H * K * T * T

    def attend(q, k, v, ids):
        return sparse_attention(q, k, v, ids, **MOSAIC)

    def select(iq, ik):
        return block_select(iq, ik, num_blocks=R, **MOSAIC).ids

    def loss(iq, ik, q, k, ids):
        return index_kl(iq, ik, q, k, ids, **MOSAIC)

    def train(q, k, v, iq, ik, probe, ids):
        return sparse_attention_and_index_kl(q, k, v, iq, ik, ids, probe=probe, **MOSAIC)

    attend_both = functools.partial(with_gradients(attend), constants=(ids,))
    loss_both = functools.partial(with_gradients(loss), constants=(*x[:2], ids))
    train_both = functools.partial(with_gradients(train), constants=(ids,))
    yield from measured("block_select", jax.jit(select), x.iq_BTKI, x.ik_BSI, repeats=repeats, flops=index_flops)
    yield from measured("attend forward", jax.jit(attend), *x[:3], ids, repeats=repeats, flops=forward_flops)
    yield from measured("attend forward + backward", attend_both, *x[:3], repeats=repeats, flops=3.5 * forward_flops)
    yield from measured("index_kl forward + backward", loss_both, x.iq_BTKI, x.ik_BSI, repeats=repeats)
    yield from measured("attend and index_kl forward + backward", train_both, *x, jnp.float32(0), repeats=repeats)


def dense_rows(x: Inputs, *, repeats: int, known: dict[str, tuple[int, float]]) -> Iterator[dict]:
    """cuDNN causal attention; where it refuses a length, four times the time of half of it for every doubling, marked as extrapolated."""
    T = x.q_BTNH.shape[1]

    def dense(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    todo = [("dense forward", jax.jit(dense), 2 * N * H * T * T)]
    if T <= DENSE_UP_TO:
        todo.append(("dense forward + backward", with_gradients(dense), 7 * N * H * T * T))
    for name, f, flops in todo:
        (row,) = measured(name, f, *x[:3], repeats=repeats, flops=flops)
        if "ms" not in row and name in known:
            length, ms = known[name]
            row |= stage(name, ms * (T / length) ** 2, extrapolated_from=length)
        elif "ms" in row:
            known[name] = T, row["ms"]
        yield row


def torch_rows(T: int, *, repeats: int) -> Iterator[dict]:
    """PyTorch's flash and cuDNN attention, forward, where PyTorch is installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, heads, T, H, device="cuda", dtype=torch.bfloat16) for heads in (N, K, K))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        name = f"torch {backend.name.lower()} forward"
        try:
            with sdpa_kernel(backend):
                for i in range(repeats + 1):
                    if i == 1:
                        start.record()
                    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                end.record()
            torch.cuda.synchronize()
            yield stage(name, start.elapsed_time(end) / repeats, flops=2 * N * H * T * T)
        except RuntimeError as error:
            yield {"stage": name, "not_measured": str(error)[:300]}
    del q, k, v
    torch.cuda.empty_cache()


def ratios(rows: list[dict]) -> Iterator[dict]:
    """Dense time over MSA time for whole prefill attention and for training, gradients and value of the index loss included."""
    ms = {row["stage"]: row["ms"] for row in rows if "ms" in row}
    prefill, training = ("block_select", "attend forward"), ("block_select", "attend and index_kl forward + backward")
    for name, dense, parts in (("prefill", "dense forward", prefill), ("training", "dense forward + backward", training)):
        if dense in ms and all(part in ms for part in parts):
            total = sum(ms[part] for part in parts)
            yield {"stage": f"ratio {name}", "ms": round(total, 3), "dense_over_msa": round(ms[dense] / total, 2)}


def selections(T: int, path: Path | None) -> Iterator[tuple[str, jax.Array]]:
    yield "uniform", selection(jax.random.key(0), T=T)
    yield "clustered", selection(jax.random.key(0), T=T, share=0.75)
    yield "sink", selection(jax.random.key(0), T=T, sink=True)
    if path is not None:
        trained = np.load(path, allow_pickle=False)["ids"]
        if trained.shape == (K, T, R):
            yield "trained", jnp.asarray(trained, jnp.int32)[None]


def run(lengths: list[int], path: Path | None) -> Iterator[dict]:
    known: dict[str, tuple[int, float]] = {}
    for T in lengths:
        x = inputs(T)
        repeats = max(2, min(10, 2**19 // T))
        dense = [{"T": T, **row} for row in dense_rows(x, repeats=1 if T > DENSE_UP_TO else repeats, known=known)]
        if T <= DENSE_UP_TO:
            dense += [{"T": T, **row} for row in torch_rows(T, repeats=repeats)]
        yield from dense
        for name, ids in selections(T, path):
            rows = [{"T": T, "selection": name, **row} for row in sparse_rows(x, ids, repeats=repeats)]
            yield from rows
            if T <= ONE_CHUNK:
                yield from ({"T": T, "selection": name, **row} for row in stage_rows(x.q_BTNH, x.k_BSKH, x.v_BSKH, ids, milliseconds))
            yield from ({"T": T, "selection": name, **row} for row in ratios(dense + rows))


def checked_out() -> str | None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072, 524288, 1048576])
    parser.add_argument("--ids", type=Path, help=".npz with ids [K, T, R] of a trained model")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--commit", help="of the code that runs, where its checkout does not say")
    arguments = parser.parse_args()
    device = jax.devices()[0].device_kind
    about = {"commit": arguments.commit or checked_out(), "device": device, "jax": jax.__version__, "shape": [N, K, H, C, R]}
    parity = {"stage": "parity", **{name: float(f"{error:.2e}") for name, error in check_parity().items()}}
    for row in itertools.chain([parity], run(arguments.lengths, arguments.ids)):
        print(json.dumps(row), flush=True)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps({**row, **about}) + "\n")


if __name__ == "__main__":
    main()
