"""The multi-token-prediction head of Qwen3.5, 3.6, 3.8 and Qwen3-Next (``qwen3_5_mtp``), in its own folder.

One step predicts token t + 2 from token t + 1 and the target's hidden state of token t, taken after its final norm:
x = norm(layers(fc([pre_fc_norm_embedding(embed(token)), pre_fc_norm_hidden(hidden)]))), logits = head(x). The layers,
one after the other, are full-attention Qwen3.5 layers; embedding and output head are the target's. x is also what
the next step is given in place of a hidden state. Norms are stored as gains, as split-mtp writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.runtime.drafters._nextn import AGAIN, HeadDrafter
from draftpair.runtime.libraries import reading
from draftpair.runtime.options import is_on
from draftpair.runtime.targets.qwen3_5 import check_sizes, rope_parameters
from draftpair.runtime.weights import Weights, fill, quantize_like, read_weights

MOST_LAYERS = 8
QUANTIZE_VARIABLE = "MLXCEL_MTP_QUANTIZE_DRAFTER"
BITS, GROUP_SIZE = 4, 64

# One of them picks the experts, the other scales all of what the shared one says: rounding shows.
FULL_PRECISION = ("mlp.gate", "mlp.shared_expert_gate")


def layer_args(config: ConfigView, weights: Weights) -> TextModelArgs:
    """The numbers of the head's layers, for mlx-lm. Refused when a size is missing or below 1.

    Where config and tensors disagree about experts and biases, the tensors are right.
    """
    sparse = any(".mlp.switch_mlp." in name for name in weights)
    check_sizes(config, sparse)
    own = {
        "full_attention_interval": 1,  # every layer of the head has full attention
        "num_experts": config.get("num_experts") if sparse else 0,
        "attention_bias": any(name.endswith(".self_attn.q_proj.bias") for name in weights),
    }
    args: TextModelArgs = TextModelArgs.from_dict(
        {**config.raw, **config.text, **rope_parameters(config), **own}
    )
    return args


def depth(config: ConfigView, weights: Weights) -> int:
    """How many layers the head has: what the config says, else what the tensors' names do."""
    key = "mtp_num_hidden_layers"
    named = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    layers = config.require_int(key, minimum=1) if config.get(key) is not None else len(named)
    if not 1 <= layers <= MOST_LAYERS:
        raise Refused(f"the head has {layers} layers; expected 1 to {MOST_LAYERS}")
    return layers


class Network(nn.Module):
    """The module tree whose parameter names are the tensor names of the drafter folder."""

    def __init__(self, args: TextModelArgs, layers: int) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [DecoderLayer(args, number) for number in range(layers)]
        self.norm = nn.RMSNorm(width, eps=eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence[KVCache]) -> mx.array:
        """Embeddings of tokens [1, L, H] and the hidden states before them [1, L, H] -> [1, L, H]."""
        halves = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(halves, axis=-1))
        mask = create_attention_mask(x, caches[0])
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask, cache)
        out: mx.array = self.norm(x)
        return out


class Drafter(HeadDrafter):
    """See ``draftpair.runtime.interfaces.ModelDrafter``."""

    def __init__(self, args: TextModelArgs, network: Network) -> None:
        self.network = network
        self.depth = len(network.layers)
        self.vocab_size: int = args.vocab_size
        self.hidden_size: int = args.hidden_size
        self.reset()

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        weights = read_weights(checkpoint)
        with reading(f"{checkpoint.source}: mlx-lm cannot use its config.json", AGAIN):
            args = layer_args(checkpoint.config, weights)
            network = Network(args, depth(checkpoint.config, weights))
        quantize_like(network, weights, checkpoint)
        fill(network, weights, checkpoint)
        if quantizes(environ) and not any(name.endswith(".scales") for name in weights):
            nn.quantize(network, group_size=GROUP_SIZE, bits=BITS, class_predicate=_packable)
        return cls(args, network)

    def forward(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Computed in the drafter's dtype and handed on in the target's."""
        embedded = self.lender.embed(tokens)
        own = self.network.pre_fc_norm_hidden.weight.dtype
        return self.network(embedded.astype(own), hidden.astype(own), self.caches).astype(embedded.dtype)

    def logits(self, x: mx.array) -> mx.array:
        return self.lender.head(x)[:, -1]


def quantizes(environ: Mapping[str, str]) -> bool:
    """Whether a head in full precision is packed in 4 bits at load: as the variable says, else on a GPU.

    There it is the faster form; MLX's CPU backend multiplies packed weights more slowly than float32.
    """
    said = environ.get(QUANTIZE_VARIABLE)
    return is_on(said) if said else bool(mx.default_device() != mx.cpu)


def _packable(path: str, module: nn.Module) -> bool:
    """Whether a module is a matrix that can be packed; stacked experts are not, as mlxcel leaves them."""
    fits = isinstance(module, nn.Linear) and module.weight.shape[-1] % GROUP_SIZE == 0
    return fits and not path.endswith(FULL_PRECISION)
