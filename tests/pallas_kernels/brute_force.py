"""The definitions of the ops again, in numpy and with loops, sharing nothing with the package: the reference is tested against it."""

import math

import numpy as np


def places(num_keys: int, segments_S: np.ndarray | None, positions_S: np.ndarray | None) -> list[tuple[int, int]]:
    """(segment, position in it) of each key of one row."""
    if segments_S is None:
        return [(1, j) for j in range(num_keys)]
    if positions_S is not None:
        return list(zip(segments_S.tolist(), positions_S.tolist(), strict=True))
    found, seen = [], {}
    for segment in segments_S.tolist():
        found.append((segment, seen.get(segment, 0)))
        seen[segment] = seen.get(segment, 0) + 1
    return found


def each_query(num_queries: int, num_keys: int, batch: int, segments=None, positions=None, q_offset=None):
    """Yields (b, t, {visible key: its position}, the query's own position)."""
    for b in range(batch):
        row = places(num_keys, None if segments is None else segments[b], None if positions is None else positions[b])
        offset = num_keys - num_queries if q_offset is None else int(q_offset[b])
        for t in range(num_queries):
            segment, position = row[offset + t]
            keys = [j for j in range(offset + t + 1) if segment > 0 and row[j][0] == segment]
            yield b, t, {j: row[j][1] for j in keys}, position


def log_sum_exp(values: list[float]) -> float:
    if not values:
        return -math.inf
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def softmax(values: dict[int, float]) -> dict[int, float]:
    lse = log_sum_exp(list(values.values()))
    return {j: math.exp(value - lse) for j, value in values.items()}


def block_select(iq, ik, *, block_size, num_blocks, local_blocks=1, init_blocks=0, **layout):
    batch, num_queries, num_kv_heads, width = iq.shape
    ids = np.full((batch, num_kv_heads, num_queries, num_blocks), -1)
    lse = np.full((batch, num_kv_heads, num_queries), -math.inf)
    for b, t, positions, position in each_query(num_queries, ik.shape[1], batch, **layout):
        own = position // block_size
        for k in range(num_kv_heads):
            scores = {j: float(iq[b, t, k] @ ik[b, j]) / math.sqrt(width) for j in positions}
            best: dict[int, float] = {}
            for j, score in scores.items():
                block = positions[j] // block_size
                best[block] = max(best.get(block, -math.inf), -math.inf if math.isnan(score) else score)
            always = [block for block in best if block > own - local_blocks or block < init_blocks]
            others = sorted((block for block in best if block not in always), key=lambda block: (-best[block], block))
            kept = sorted((always + others)[:num_blocks])
            ids[b, k, t, : len(kept)] = kept
            lse[b, k, t] = log_sum_exp([score for j, score in scores.items() if positions[j] // block_size in kept])
    return ids, lse


def _supports(shape, num_keys, ids, block_size, layout):
    batch, num_queries, num_kv_heads = shape
    for b, t, positions, position in each_query(num_queries, num_keys, batch, **layout):
        for k in range(num_kv_heads):
            valid = range(position // block_size + 1) if ids is None else {i for i in ids[b, k, t].tolist() if i >= 0}
            yield b, t, k, [j for j in positions if positions[j] // block_size in valid]


def sparse_attention(q, k, v, ids, *, block_size, **layout):
    batch, num_queries, num_heads, width = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    out = np.zeros((batch, num_queries, num_heads, v.shape[-1]))
    lse = np.full((batch, num_queries, num_heads), -math.inf)
    shape = (batch, num_queries, num_kv_heads)
    for b, t, head, keys in _supports(shape, k.shape[1], ids, block_size, layout):
        for n in range(head * group, (head + 1) * group):
            logits = {j: float(q[b, t, n] @ k[b, j, head]) / math.sqrt(width) for j in keys}
            for j, p in softmax(logits).items():
                out[b, t, n] += p * v[b, j, head]
            lse[b, t, n] = log_sum_exp(list(logits.values()))
    return out, lse


def index_kl(iq, ik, q, k, ids, *, block_size, weights=None, denominator=None, **layout):
    """The loss, diq and dik, the gradients by the formula dS = w (student - teacher) / (denominator K)."""
    batch, num_queries, num_kv_heads, width = iq.shape
    group = q.shape[2] // num_kv_heads
    real = {(b, t) for b, t, positions, _ in each_query(num_queries, ik.shape[1], batch, **layout) if positions}
    if weights is None:
        weights = np.array([[float((b, t) in real) for t in range(num_queries)] for b in range(batch)])
    denominator = weights.sum() if denominator is None else denominator
    loss, diq, dik = 0.0, np.zeros(iq.shape), np.zeros(ik.shape)
    shape = (batch, num_queries, num_kv_heads)
    for b, t, head, keys in _supports(shape, ik.shape[1], ids, block_size, layout):
        student = softmax({j: float(iq[b, t, head] @ ik[b, j]) / math.sqrt(width) for j in keys})
        teacher = dict.fromkeys(keys, 0.0)
        for n in range(head * group, (head + 1) * group):
            for j, p in softmax({j: float(q[b, t, n] @ k[b, j, head]) / math.sqrt(q.shape[-1]) for j in keys}).items():
                teacher[j] += p / group
        weight = weights[b, t] / denominator / num_kv_heads if denominator else 0.0
        for j in keys:
            loss += weight * teacher[j] * math.log(teacher[j] / student[j])
            ds = weight * (student[j] - teacher[j]) / math.sqrt(width)
            diq[b, t, head] += ds * ik[b, j]
            dik[b, j] += ds * iq[b, t, head]
    return loss, diq, dik
