"""Text and vision together from the first step: the reference experiment, in a size that a CPU trains in minutes.

About 1M parameters (half of them the tied embedding), 512 tokens a row, blocks of 16 keys, 8 blocks a query. Half of the
rows hold captioned pictures. The index branch warms up under full attention, then selects; WSD decays at the end.

    python train.py --config configs/native.py                 8 minutes on 2 CPU cores
    python train.py --config configs/native.py --variant s     4M parameters, 40M text tokens: a minute on an H200
    python train.py --config configs/native.py --variant m     20M parameters, 80M text tokens, bfloat16: minutes on an H200
"""

from msa_jax.config import (
    DataConfig,
    EvalConfig,
    Experiment,
    GroupConfig,
    ModelConfig,
    MsaConfig,
    OptimConfig,
    StreamConfig,
    TrainConfig,
    VisionConfig,
)


def config() -> Experiment:
    return Experiment(
        name="native",
        model=ModelConfig(
            attention=MsaConfig(d_model=128, num_heads=4, num_kv_heads=2, head_dim=32, index_dim=32, block_size=16, num_blocks=8),
            vocab_size=4096,
            num_layers=4,
            pattern="M",
            mlp_dim=352,
            vision=VisionConfig(width=64, num_layers=3, num_heads=2, mlp_dim=256, patch_size=4, merge=2, sequence_length=64),
        ),
        data=DataConfig(
            pack="data/small",
            sequence_length=512,
            streams=(StreamConfig("text", rows=((0, 4),)), StreamConfig("captions", kind="captions", rows=((0, 4),), loss_weight=4.0)),
        ),
        optim=OptimConfig(
            learning_rate=5e-3, warmup_steps=20, decay_fraction=0.3, final_fraction=0.05, b2=0.98, index=GroupConfig(weight_decay=0.0)
        ),
        train=TrainConfig(steps=400, index_warmup_steps=40, kl_weight=1.0, checkpoint_every=100),
        eval=EvalConfig(text_rows=16, pictures=60, candidates=50),
    )


def variants() -> dict[str, dict]:
    """Larger sizes of the same experiment; rows a step and steps follow from their token budgets."""
    return {
        "s": {
            "model.attention.d_model": 256, "model.attention.num_heads": 8, "model.mlp_dim": 704, "train.steps": 1100,
            "data.streams.0.rows": [[0, 72]], "data.streams.1.rows": [[0, 8]],
            "optim.warmup_steps": 50, "train.index_warmup_steps": 110, "train.checkpoint_every": 550,
        },
        "m": {
            "model.attention.d_model": 512, "model.attention.num_heads": 16, "model.attention.num_kv_heads": 4,
            "model.num_layers": 6, "model.mlp_dim": 1408, "model.dtype": "bfloat16", "train.steps": 2200,
            "data.streams.0.rows": [[0, 72]], "data.streams.1.rows": [[0, 8]], "optim.learning_rate": 2e-3,
            "optim.warmup_steps": 50, "train.index_warmup_steps": 220, "train.checkpoint_every": 550,
        },
    }  # fmt: skip
