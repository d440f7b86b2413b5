"""Which architectures of other libraries train as they come: small ones of their own configurations, random weights.

Of each, one line: whether it trains under fedsgd from a run file, passes PBPFL's check, and trains block by block under
baffle; or the sentence by which it is refused. Each is judged by a plain run that uses nothing of Moretta's: two steps
of the library's model on all rows, silo by silo, against which the weights after fedsgd and pbpfl in float64 are held,
and the plain model's outputs, against which those of baffle's graph are. Lines are appended to a file as they come, and
what is there is not measured again.

    pip install torchvision==0.28.0 transformers timm monai einops peft segmentation-models-pytorch

    python benchmarks/architectures.py --json benchmarks/records/architectures.jsonl [NAME ...]
    python benchmarks/architectures.py --page    writes the table of docs/models-measured.md from that record
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moretta.config import run_files
from moretta.errors import MorettaError
from moretta.models import hooks
from moretta.protocols.common import modules
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.run.assembly import federation_of
from moretta.run.federation import Federation
from moretta.secure_aggregation.keystream import SecretRoot

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "protocols" / "pbpfl"))
from torchvision_stub import torchvision

ROWS, CLASSES, VOCABULARY = 8, 3, 50
RATE = 0.05
CLOSE = 1e-4  # by which two rounds' steps may differ from the plain run's; pbpfl's are in float64, all others float32
# Where plain runs themselves part by more, as with batch normalisation of two rows: so many times what these part by.
TIMES, DRAWS, LAST_BIT = 3, 3, {torch.float32: 2.0**-24, torch.float64: 2.0**-41}
SHARES = ("scaled", "permuted", "plain")
KINDS = ("fedsgd", "pbpfl", "blocks")
ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "benchmarks" / "records" / "architectures.jsonl", ROOT / "docs" / "models-measured.md"
BEGIN, END = "<!-- architectures:begin -->", "<!-- architectures:end -->"


@dataclass(frozen=True)
class Case:
    """One architecture. rows: what a row is, by name or alone: a shape, "N words", "N mask"; dense: outputs a row."""

    source: str
    arguments: Mapping[str, Any]
    rows: Mapping[str, str] | str
    dense: tuple[int, ...] | None = None

    def arrays(self, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return rows by the names of the model's arguments ("" for one array), and targets."""
        random = np.random.default_rng(seed)
        named = {"": self.rows} if isinstance(self.rows, str) else self.rows
        found = {name: _drawn(random, told) for name, told in named.items()}
        if self.dense is None:
            return found, np.arange(ROWS) % CLASSES
        return found, random.normal(size=(ROWS, *self.dense)).astype("float32")


def _drawn(random: np.random.Generator, told: str) -> np.ndarray:
    size, _, kind = told.partition(" ")
    shape = tuple(map(int, size.split(",")))
    if kind == "words":
        return random.integers(3, VOCABULARY, size=(ROWS, *shape))
    if kind == "mask":
        return (np.arange(shape[0]) < random.integers(2, shape[0] + 1, size=(ROWS, 1))).astype(bool)
    return random.normal(size=(ROWS, *shape)).astype("float32")


WORDS, PADDED = "12 words", {"ids": "12 words", "mask": "12 mask"}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
LLAMA = {**TEXT, "num_key_value_heads": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PICTURE = {**SMALL, "image_size": 32, "patch_size": 8}


def _hf(name: str, rows: Any, **arguments: Any) -> Case:
    return Case(f"transformers:{name}", arguments, rows)


def _image(package: str, name: str, size: int = 32, **arguments: Any) -> Case:
    return Case(f"{package}:{name}", arguments, f"3,{size},{size}")


PLANE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
GREY, MASKS = "1,16,16", (2, 16, 16)
LONG = {"max_position_embeddings": 64, "vocab_size": VOCABULARY}


def _text(name: str, rows: Any = PADDED, **arguments: Any) -> Case:
    return _hf(f"{name}ForSequenceClassification", rows, **TEXT | arguments)


def _llm(name: str, **arguments: Any) -> Case:
    return _hf(f"{name}ForSequenceClassification", PADDED, **LLAMA | arguments)


def _vision(name: str, rows: str = "3,32,32", **arguments: Any) -> Case:
    return _hf(f"{name}ForImageClassification", rows, **arguments)


def _dense(source: str, rows: str = GREY, outputs: tuple[int, ...] = MASKS, **arguments: Any) -> Case:
    return Case(source, arguments, rows, outputs)


GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32, "pad_token_id": 0}
SOUND = {
    **SMALL,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "layerdrop": 0.0,
}

CASES: dict[str, Case] = {
    # text
    "bert": _text("Bert"),
    "bert, no padding": _text("Bert", WORDS, **NO_DROPOUT),
    "distilbert": _hf(
        "DistilBertForSequenceClassification",
        PADDED,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    ),
    "roberta": _text("Roberta", pad_token_id=1, **NO_DROPOUT),
    "albert": _text("Albert", embedding_size=8, classifier_dropout_prob=0.0),
    "electra": _text("Electra", embedding_size=8),
    "deberta-v2": _text(
        "DebertaV2", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], **NO_DROPOUT
    ),
    "mpnet": _text("MPNet", pad_token_id=1, **NO_DROPOUT),
    "squeezebert": _text(
        "SqueezeBert",
        embedding_size=16,
        q_groups=1,
        k_groups=1,
        v_groups=1,
        post_attention_groups=1,
        intermediate_groups=1,
        output_groups=1,
        **NO_DROPOUT,
    ),
    "roformer": _text("RoFormer", embedding_size=16, **NO_DROPOUT),
    "modernbert": _hf(
        "ModernBertForSequenceClassification", PADDED, **TEXT, global_attn_every_n_layers=2, local_attention=8
    ),
    "fnet": _hf(
        "FNetForSequenceClassification",
        WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=32,
        **LONG,
        pad_token_id=0,
        hidden_dropout_prob=0.0,
    ),
    "xlnet": _hf(
        "XLNetForSequenceClassification",
        WORDS,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=32,
        vocab_size=VOCABULARY,
        dropout=0.0,
        summary_last_dropout=0.0,
    ),
    "t5 encoder, at every word": _dense(
        "transformers:T5ForTokenClassification",
        WORDS,
        (12, 3),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        num_labels=3,
    ),
    "bert, at every word": Case(
        "transformers:BertForTokenClassification", {**TEXT, **NO_DROPOUT, "num_labels": 3}, PADDED, (12, 3)
    ),
    "gpt2": _hf("GPT2ForSequenceClassification", PADDED, **GPT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "opt": _hf(
        "OPTForSequenceClassification",
        PADDED,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        word_embed_proj_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        pad_token_id=1,
        dropout=0.0,
    ),
    "gpt-neox": _llm("GPTNeoX"),
    "phi": _llm("Phi", resid_pdrop=0.0),
    "llama": _llm("Llama"),
    "qwen2": _llm("Qwen2"),
    "qwen3": _llm("Qwen3", head_dim=8),
    "mistral": _llm("Mistral"),
    "mixtral": _llm("Mixtral", num_local_experts=2, num_experts_per_tok=1),
    "gemma": _llm("Gemma", head_dim=8),
    "gemma 2": _llm("Gemma2", head_dim=8),
    "mamba": Case("architectures:mamba", {}, WORDS),
    "lora on bert": Case("architectures:lora", {}, PADDED),
    # images and sound
    "vit": _vision("ViT", **PICTURE),
    "deit": _vision("DeiT", **PICTURE),
    "beit": _vision("Beit", **PICTURE, drop_path_rate=0.0),
    "dinov2": _vision(
        "Dinov2", image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    ),
    "swin": _vision(
        "Swin",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "convnext": _vision("ConvNext", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    "convnext v2": _vision("ConvNextV2", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    "resnet": _vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "regnet": _vision("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    "mobilenet v2": _vision("MobileNetV2", image_size=32, depth_multiplier=0.1, min_depth=4, finegrained_output=False),
    "poolformer": _vision("PoolFormer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], drop_path_rate=0.0),
    "segformer": _dense(
        "transformers:SegformerForSemanticSegmentation",
        "3,32,32",
        (2, 8, 8),
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
        num_labels=2,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    ),
    "wav2vec2": _hf("Wav2Vec2ForSequenceClassification", "800", **SOUND, mask_time_prob=0.0),
    "hubert": _hf("HubertForSequenceClassification", "800", **SOUND, mask_time_prob=0.0),
    "audio spectrogram transformer": _hf(
        "ASTForAudioClassification",
        "32,16",
        **SMALL,
        patch_size=8,
        max_length=32,
        num_mel_bins=16,
        frequency_stride=8,
        time_stride=8,
    ),
    "timm resnet": _image("timm", "test_resnet", num_classes=3),
    "timm vit": _image("timm", "test_vit", img_size=32, num_classes=3),
    "timm efficientnet": _image("timm", "test_efficientnet", num_classes=3),
    "timm convnext": _image("timm", "test_convnext", num_classes=3),
    "timm nfnet": _image("timm", "test_nfnet", num_classes=3),
    "timm mixer": Case(
        "timm.models.mlp_mixer:MlpMixer",
        {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2, "num_classes": 3},
        "3,32,32",
    ),
    "timm mambaout": _image("timm", "test_mambaout", num_classes=3),
    "torchvision densenet": _image(
        "torchvision", "DenseNet", growth_rate=4, block_config=[2, 2], num_init_features=8, num_classes=3
    ),
    "torchvision vit": _image(
        "torchvision",
        "VisionTransformer",
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        num_classes=3,
    ),
    "torchvision swin": _image(
        "torchvision",
        "SwinTransformer",
        patch_size=[4, 4],
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=[4, 4],
        num_classes=3,
        stochastic_depth_prob=0.0,
    ),
    "torchvision shufflenet": _image("torchvision", "shufflenet_v2_x0_5", num_classes=3),
    "torchvision mnasnet": _image("torchvision", "MNASNet", alpha=0.1, num_classes=3, dropout=0.0),
    "torchvision squeezenet": _image("torchvision", "squeezenet1_1", num_classes=3),
    "torchvision lraspp": _dense("torchvision:lraspp_mobilenet_v3_large", "3,32,32", (2, 32, 32), num_classes=2),
    # medicine
    "monai densenet": Case(
        "monai:DenseNet",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 3,
            "init_features": 8,
            "growth_rate": 4,
            "block_config": [2, 2],
        },
        GREY,
    ),
    "monai resnet": Case(
        "monai:ResNet",
        {
            "block": "basic",
            "layers": [1, 1, 1, 1],
            "block_inplanes": [4, 4, 8, 8],
            "spatial_dims": 2,
            "n_input_channels": 1,
            "num_classes": 3,
        },
        GREY,
    ),
    "monai vit": Case(
        "monai:ViT",
        {
            "in_channels": 1,
            "img_size": [16, 16],
            "patch_size": [8, 8],
            "hidden_size": 16,
            "mlp_dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "classification": True,
            "num_classes": 3,
            "spatial_dims": 2,
            "post_activation": "",
        },
        GREY,
    ),
    "monai unet": _dense("monai:UNet", **PLANE, channels=[4, 8, 8], strides=[2, 2]),
    "monai unet, residual units": _dense("monai:UNet", **PLANE, channels=[4, 8, 8], strides=[2, 2], num_res_units=2),
    "monai unet, volumes": _dense(
        "monai:UNet", "1,8,8,8", (2, 8, 8, 8), **{**PLANE, "spatial_dims": 3}, channels=[4, 8], strides=[2]
    ),
    "monai attention unet": _dense("monai:AttentionUnet", **PLANE, channels=[4, 8], strides=[2]),
    "monai basic unet": _dense("monai:BasicUNet", "1,32,32", (2, 32, 32), **PLANE, features=[4, 4, 8, 8, 8, 4]),
    "monai dynunet": _dense(
        "monai:DynUNet",
        **PLANE,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 8],
    ),
    "monai segresnet": _dense("monai:SegResNet", **PLANE, init_filters=8, blocks_down=[1, 1], blocks_up=[1]),
    "monai swin-unetr": _dense(
        "monai:SwinUNETR",
        "1,64,64",
        (2, 64, 64),
        in_channels=1,
        out_channels=2,
        feature_size=12,
        spatial_dims=2,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 2, 2],
    ),
    "monai unetr": _dense(
        "monai:UNETR",
        "1,16,16",
        MASKS,
        in_channels=1,
        out_channels=2,
        img_size=[16, 16],
        feature_size=4,
        hidden_size=16,
        mlp_dim=32,
        num_heads=2,
        spatial_dims=2,
    ),
    "smp unet": _dense(
        "segmentation_models_pytorch:Unet",
        "3,32,32",
        (2, 32, 32),
        encoder_name="tu-test_resnet",
        encoder_depth=3,
        decoder_channels=[16, 8, 8],
        classes=2,
    ),
    "smp fpn": _dense(
        "segmentation_models_pytorch:FPN",
        "3,32,32",
        (2, 32, 32),
        encoder_name="tu-test_resnet",
        encoder_depth=4,
        decoder_pyramid_channels=8,
        decoder_segmentation_channels=32,
        upsampling=2,
        classes=2,
        decoder_dropout=0.0,
    ),
    # sequences and tables
    "lstm": Case("architectures:recurrent", {"kind": "LSTM"}, WORDS),
    "gru": Case("architectures:recurrent", {"kind": "GRU", "bidirectional": True}, WORDS),
    "tcn": Case("architectures:tcn", {}, "4,24"),
    "ft-transformer": Case("architectures:ft_transformer", {}, "10"),
}


# -- what no library has under one name --------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Words, a recurrent layer, its last state, a linear head."""

    def __init__(self, kind: str, bidirectional: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.layer = getattr(nn, kind)(8, 12, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(24 if bidirectional else 12, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(self.words(words))[0][:, -1])
        return found


def recurrent(kind: str, bidirectional: bool = False) -> nn.Module:
    """Return a recurrent classifier."""
    return Recurrent(kind, bidirectional)


class Convolved(nn.Module):
    """Dilated causal convolutions with weight normalisation, and the last step of a head that runs over all."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            normed(nn.Conv1d(4 if n == 0 else 8, 8, 3, padding=2 * 2**n, dilation=2**n)) for n in range(3)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)[..., : x.shape[-1]])
        found: Tensor = self.head(x.transpose(1, 2))[:, -1]
        return found


def tcn() -> nn.Module:
    """Return a temporal convolutional network."""
    return Convolved()


class Tokens(nn.Module):
    """A token a column and a class token through a transformer, as FT-Transformer has it."""

    def __init__(self, columns: int = 10, width: int = 16) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(columns, width)), nn.Parameter(torch.randn(columns, width))
        self.first = nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.first.expand(len(x), -1, -1), x[..., None] * self.weight + self.bias], dim=1)
        found: Tensor = self.head(torch.relu(self.norm(self.encoder(tokens)[:, 0])))
        return found


def ft_transformer() -> nn.Module:
    """Return a transformer of tables."""
    return Tokens()


def mamba() -> nn.Module:
    """Return Mamba's layers and a linear head over the last word."""
    import transformers

    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4, vocab_size=VOCABULARY)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = transformers.MambaModel(config), nn.Linear(16, CLASSES)

        def forward(self, words: Tensor) -> Tensor:
            found: Tensor = self.head(self.layers(words, use_cache=False).last_hidden_state[:, -1])
            return found

    return Classifier()


def lora() -> nn.Module:
    """Return BERT with adapters of rank 4 by peft; all else but the head is frozen."""
    import peft
    import transformers

    config = transformers.BertConfig(**TEXT, **NO_DROPOUT, num_labels=CLASSES)
    wanted = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    found: nn.Module = peft.get_peft_model(transformers.BertForSequenceClassification(config), wanted)
    return found


# -- the plain run -----------------------------------------------------------------------------------------------------


def plain_output(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """Return what a library's model gives, [rows, outputs], as its own documentation says to read it."""
    names = {"ids": "input_ids", "mask": "attention_mask"}
    found = model(arrays[""]) if "" in arrays else model(**{names.get(n, n): one for n, one in arrays.items()})
    if hasattr(found, "logits"):
        found = found.logits
    elif isinstance(found, dict):
        found = found["out"]
    elif isinstance(found, tuple | list):
        found = found[0]
    return found.flatten(1)


def plain_run(
    model: nn.Module, silos: Sequence[tuple[Mapping[str, np.ndarray], np.ndarray]], rounds: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a model's parameters after so many steps of SGD along the mean of the silos' gradients."""
    model = copy.deepcopy(model).to(dtype).train()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for _ in range(rounds):
        total = {name: torch.zeros_like(one) for name, one in trained.items()}
        statistics: list[dict[str, Tensor]] = []
        before = copy.deepcopy(dict(model.named_buffers()))
        rows = sum(len(y) for _, y in silos)
        for x, y in silos:
            for name, buffer in model.named_buffers():
                buffer.data.copy_(before[name])
            arrays = {
                n: torch.tensor(one).long() if one.dtype.kind == "i" else torch.tensor(one).to(dtype)
                for n, one in x.items()
            }
            outputs, targets = plain_output(model, arrays), torch.tensor(y)
            if targets.is_floating_point():
                loss = (outputs - targets.flatten(1).to(dtype)).square().sum(1).mean() / 2
            else:
                loss = nn.functional.cross_entropy(outputs, targets)
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    total[name] += gradient * len(y) / rows
            statistics.append({name: one.clone() for name, one in model.named_buffers()})
        with torch.no_grad():
            for name, one in trained.items():
                one -= RATE * total[name]
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(sum(one[name] * len(y) / rows for one, (_, y) in zip(statistics, silos, strict=True)))
    return {name: one.detach() for name, one in trained.items()}


def draws(model: nn.Module, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether a model in training draws at random."""
    before = torch.get_rng_state()
    with torch.no_grad():
        plain_output(
            copy.deepcopy(model).train(),
            {
                n: torch.tensor(one).long() if one.dtype.kind == "i" else torch.tensor(one).float()
                for n, one in arrays.items()
            },
        )
    return not torch.equal(before, torch.get_rng_state())


# -- Moretta's runs ----------------------------------------------------------------------------------------------------


RUN = """
[run]
rounds = 2
seed = 1
dtype = "{dtype}"
[data]
source = "rows.npz"
silos = 3
test-fraction = 0.125
batch-size = 0
standardise = false
{data}
[model]
{model}
[protocol]
name = "{protocol}"
loss = "{loss}"
learning-rate = {rate}
{settings}
[secure-aggregation]
scheme = "none"
"""
BLOCKS = 'perturb = "blocks"\n'


def federation(case: Case, folder: Path, protocol: str, dtype: str, settings: str = "") -> Federation:
    """Write a run file and its rows, and return its federation."""
    arrays, y = case.arrays(1)
    named = {f"x.{name}" if name else "x": one for name, one in arrays.items()}
    np.savez(folder / "rows.npz", y=y if case.dense is None else y.reshape(ROWS, -1), **named)
    text = RUN.format(
        dtype=dtype,
        model="\n".join(
            f"{key} = {json.dumps(value)}" for key, value in {"source": case.source, **case.arguments}.items()
        ),
        protocol=protocol,
        rate=RATE,
        settings=settings,
        data="" if case.dense is None else "standardise-targets = false",
        loss="cross-entropy" if case.dense is None else "mse",
    )
    (folder / "run.toml").write_text(text)
    return federation_of(run_files.load(folder / "run.toml"), None)


def held(made: Federation) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Return the rows of each silo, by array."""
    return [
        ({"": silo.x} if made.layout is None else dict(made.layout.unpack(silo.x)), silo.y)  # type: ignore[arg-type]
        for silo in made.silos
    ]


@torch.no_grad()
def moved(after: Mapping[str, Tensor], wanted: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """Return by how much steps differ from the plain run's, of the size of all of these."""
    gaps = sum(float((after[name].double() - one.double()).square().sum()) for name, one in wanted.items())
    steps = sum(float((one.double() - before[name].double()).square().sum()) for name, one in wanted.items())
    return float((gaps / max(steps, 1e-300)) ** 0.5)


def bare(model: nn.Module) -> nn.Module:
    """Return a copy of a model as its library built it."""
    return hooks.gives_all(hooks.takes_arrays(copy.deepcopy(model)))


def trained(case: Case, protocol: str, dtype: str) -> dict[str, Any]:
    """Train two rounds, and compare the steps with the plain run's."""
    with tempfile.TemporaryDirectory() as folder:
        made = federation(case, Path(folder), protocol, dtype)
        start = modules.first_weights(made.model)
        began = time.perf_counter()
        result = made.train(2, seed=1, progress=False)
        seconds = time.perf_counter() - began
    after = dict(result.raw_model(true_model=True).network.named_parameters())
    silos, kind = held(made), getattr(torch, dtype)
    found: dict[str, Any] = {"seconds": seconds, "parameters": sum(one.numel() for one in start.parameters())}
    found["loss"] = [line.get("loss") for line in result.history]
    if draws(bare(start).float(), silos[0][0]):
        return {**found, "differs": None}
    wanted, before = plain_run(bare(start), silos, 2, kind), dict(start.named_parameters())
    found["differs"] = moved(after, wanted, before)
    if found["differs"] > CLOSE:
        found["spread"] = spread(bare(start), silos, wanted, before, kind)
    return found


def spread(model: nn.Module, silos: Any, wanted: Any, before: Mapping[str, Tensor], kind: torch.dtype) -> float:
    """Return how far plain runs part whose weights begin apart by the last bit that silos are sent."""
    random, found = torch.Generator().manual_seed(0), list[float]()
    for _ in range(DRAWS):
        other = copy.deepcopy(model).to(kind)
        with torch.no_grad():
            for one in other.parameters():
                one *= 1 + LAST_BIT[kind] * (2 * torch.rand(one.shape, generator=random, dtype=kind) - 1)
        found.append(moved(plain_run(other, silos, 2, kind), wanted, before))
    return max(found)


def checked(case: Case) -> dict[str, Any]:
    """Return what PBPFL's plan leaves unscaled, and how exact two rounds are in float64."""
    with tempfile.TemporaryDirectory() as folder:
        made = federation(case, Path(folder), "pbpfl", "float64")
        setting = made._setting(1, 2)
    plan = ScalePlan.of(setting.model, (setting.example(),))
    sizes = {name: one.numel() for name, one in made.model.named_parameters()}
    shares, key = {"scaled": 0, "permuted": 0, "plain": 0}, plan.draw(SecretRoot(bytes(32)).stream("shares"))
    for name, size in sizes.items():
        scaled = (np.abs(plan.multiplier(name, key)) != 1).any()  # by more than a sign
        shares["scaled" if scaled else "permuted" if plan.parameters[name].shuffles else "plain"] += size
    shares = {kind: size / sum(sizes.values()) for kind, size in shares.items()}
    return {**trained(case, "pbpfl", "float64"), "free_scales": plan.positive, **shares}


def cut(case: Case) -> dict[str, Any]:
    """Train block by block, and compare the graph's outputs with the plain model's."""
    with tempfile.TemporaryDirectory() as folder:
        made = federation(case, Path(folder), "baffle", "float32", BLOCKS + 'k = {"*" = 4}\n')
        result = made.train(2, seed=1, progress=False)
        forward = next(iter(made.players(2, 1).clients.values()))._forward  # type: ignore[attr-defined]
    x = made.silos[0].x
    at = forward.layout.flat(modules.arrays(made.model))
    outputs = forward.start(at, np.ascontiguousarray(x if x.dtype.kind in "iu" else x.astype("float32")))
    arrays = {
        n: torch.tensor(one).long() if one.dtype.kind == "i" else torch.tensor(one).float()
        for n, one in held(made)[0][0].items()
    }
    with torch.no_grad():
        wanted = plain_output(bare(made.model).eval(), arrays).numpy()
    gap = float(np.abs(outputs - wanted).max() / max(np.abs(wanted).max(), 1e-30))
    return {"blocks": len(forward.blocks), "differs": gap, "loss": [line.get("loss") for line in result.history]}


def tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what work found, or by which sentence it was refused."""
    try:
        found = work()
    except Exception as error:  # noqa: BLE001  # a refusal, or a fault to be mended: the record says which
        kind = "refused" if isinstance(error, MorettaError) else "failed"
        if kind == "failed":
            traceback.print_exc()
        return {"passes": False, kind: f"{type(error).__name__}: {error}"}
    apart = found["differs"]
    return {"passes": apart is None or apart <= max(CLOSE, TIMES * found.get("spread", 0.0)), **found}


def measured(name: str) -> dict[str, Any]:
    """Return the line of one architecture."""
    case, began = CASES[name], time.perf_counter()
    line: dict[str, Any] = {"architecture": name, "source": case.source}
    line["fedsgd"] = tried(lambda: trained(case, "fedsgd", "float32"))
    line["pbpfl"] = tried(lambda: checked(case))
    line["blocks"] = tried(lambda: cut(case))
    return {**line, "seconds": time.perf_counter() - began}


def table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of a record, as docs/models-measured.md has it."""
    yield "| architecture | fedsgd | pbpfl | scaled | permuted | plain | blocks |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        cells = [line[kind] for kind in KINDS]
        fedsgd, pbpfl, blocks = ("yes" if cell["passes"] else "no" for cell in cells)
        shares = [f"{100 * line['pbpfl'][kind]:.0f} %" if kind in line["pbpfl"] else "" for kind in SHARES]
        yield f"| {line['architecture']} | {fedsgd} | {pbpfl} | {' | '.join(shares)} | {blocks} |"
    passed = [sum(line[kind]["passes"] for line in lines) for kind in KINDS]
    yield f"| {len(lines)} in all | {passed[0]} | {passed[1]} | | | | {passed[2]} |"


def page(text: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with the table of a record, and the sentences by which architectures are refused."""
    refused = [
        f"- {line['architecture']}, {kind}: {told:.240}"
        for line in lines
        for kind in KINDS
        if not line[kind]["passes"]
        for told in [line[kind].get("refused") or line[kind].get("failed") or f"differs by {line[kind]['differs']:.0e}"]
    ]
    why = ["", "What is refused, and why:", "", *refused] if refused else []
    block = "\n".join([*table(lines), *why])
    return re.sub(rf"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{block}\n\n{END}", text, flags=re.DOTALL)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, in the order of the list."""
    held = {line["architecture"]: line for line in map(json.loads, path.read_text("utf-8").splitlines())}
    return [held[name] for name in CASES if name in held]


def main(words: Sequence[str] | None = None) -> None:
    """Measure what a file lacks, and print its table and its refusals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="the file that lines are appended to")
    parser.add_argument("--again", action="store_true", help="measure what is there too")
    parser.add_argument("names", nargs="*", help="of architectures; all by default")
    parser.add_argument("--page", action="store_true", help="write the page's table from the record")
    given = parser.parse_args(words)
    if given.page:
        PAGE.write_text(page(PAGE.read_text("utf-8"), read(RECORD)), "utf-8")
        return
    torchvision()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = read(given.json) if given.json and given.json.exists() else []
    lines = {line["architecture"]: line for line in known}
    for name in given.names or CASES:
        if name not in lines or given.again:
            lines[name] = measured(name)
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(lines[name]) + "\n")
        for kind in KINDS:
            cell = lines[name][kind]
            told = cell.get("refused") or cell.get("failed") or f"differs by {cell['differs']}"
            print(f"{name}: {kind}: {'passes' if cell['passes'] else 'no'}: {told}", flush=True)
    print("\n".join(table([lines[name] for name in CASES if name in lines])))


if __name__ == "__main__":
    main()
