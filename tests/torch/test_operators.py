"""Compiled modules and losses: PyTorch's values, gradients and buffers."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.support.torch_modules import (  # noqa: E402
    ResNet18,
    VisionTransformer,
    assert_exact,
    cross_entropy,
    in_both,
    mean_square,
    over_clients,
)

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def rows(seed=0, features=4):
    torch.manual_seed(seed)
    return {
        "x": torch.randn(6, features, dtype=torch.float64),
        "y": torch.randn(6, dtype=torch.float64),
        "c": torch.randint(0, 3, (6,)),
    }


def images(seed=0, side=8, count=4):
    torch.manual_seed(seed)
    return {
        "x": torch.randn(count, 3, side, side, dtype=torch.float64),
        "c": torch.randint(0, 3, (count,)),
    }


def words(seed=0):
    torch.manual_seed(seed)
    tokens = torch.randint(1, 11, (4, 5))
    tokens[0, 3:] = tokens[2, 2:] = 0  # padding
    return {"x": tokens, "c": torch.randint(0, 3, (4,))}


def seeded(make, *given, **options):
    torch.manual_seed(1)
    return make(*given, **options)


# Activations and losses: one head for each, so that the gradients by its weights tell which differs

ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 2.0),  # PyTorch rounds 1 / alpha to float32
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "softplus": lambda x: F.softplus(x, 2, 1.5),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "glu": lambda x: F.glu(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "softmax": lambda x: F.softmax(x, 1),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "erf": torch.erf,
    "pow": lambda x: x**3 + x.abs() ** 1.5,
    "log1p": lambda x: torch.log1p(x.abs()) + torch.expm1(x),
    "atan2": lambda x: torch.atan2(x, x.cos() + 2),
}

WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
LOSSES = {
    "cross_entropy": lambda x, d: F.cross_entropy(x, d["c"]),
    "weights": lambda x, d: F.cross_entropy(x, d["c"], WEIGHTS.to(x), label_smoothing=0.1),
    "ignored": lambda x, d: F.cross_entropy(x, d["c"], ignore_index=1),
    "soft": lambda x, d: F.cross_entropy(x, F.softmax(d["x"][:, :3], 1)),
    "logits": lambda x, d: F.binary_cross_entropy_with_logits(
        x, F.one_hot(d["c"], 3).to(x), WEIGHTS.to(x), pos_weight=WEIGHTS.to(x)
    ),
    "rates": lambda x, d: F.binary_cross_entropy(x.sigmoid(), F.one_hot(d["c"], 3).to(x)),
    "mse": lambda x, d: F.mse_loss(x[:, 0], d["y"]),
    "nll": lambda x, d: F.nll_loss(x.log_softmax(1), d["c"], WEIGHTS.to(x)),
    "huber": lambda x, d: F.huber_loss(x[:, 0], d["y"], delta=0.5),
    "smooth": lambda x, d: F.smooth_l1_loss(x[:, 0], d["y"], beta=0.3),
    "l1": lambda x, d: F.l1_loss(x[:, 0], d["y"], reduction="sum"),
    "kl": lambda x, d: F.kl_div(x.log_softmax(1), d["x"][:, :3].softmax(1), reduction="batchmean"),
    "poisson": lambda x, d: F.poisson_nll_loss(x[:, 0], d["y"].abs()),
    "margin": lambda x, d: F.multi_margin_loss(x, d["c"]),
    "ranking": lambda x, d: F.margin_ranking_loss(x[:, 0], x[:, 1], d["y"].sign()),
    "triplet": lambda x, d: F.triplet_margin_loss(x, x * 2 + 1, x * 3 - 1),
    "cosine": lambda x, d: F.cosine_embedding_loss(x, x.flip(1), d["y"].sign()),
}


class Heads(nn.Module):
    def __init__(self, names, width):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(4, width) for name in names})


def test_activations():
    def loss(model, data):
        return sum(f(model.heads[name](data["x"])).pow(2).sum() for name, f in ACTIVATIONS.items())

    assert_exact(*in_both(seeded(Heads, ACTIVATIONS, 4), loss, rows()), 1e-10)


def test_hardsigmoid_whose_derivative_pytorch_computes_in_float32():
    def loss(model, data):
        return F.hardsigmoid(model(data["x"])).pow(2).sum()

    assert_exact(*in_both(seeded(nn.Linear, 4, 4), loss, rows()), 1e-7)


def test_losses():
    def loss(model, data):
        return sum(f(model.heads[name](data["x"]), data) for name, f in LOSSES.items())

    assert_exact(*in_both(seeded(Heads, LOSSES, 3), loss, rows()), 1e-10)


def cox(model, data):
    risk, order = model(data["x"])[:, 0], torch.argsort(data["y"], descending=True)
    event = (data["c"][order] > 0).to(risk)
    return -((risk[order] - torch.logcumsumexp(risk[order], 0)) * event).sum() / event.sum()


def without_derivatives(model, data):
    out = model(data["x"])
    with torch.no_grad():
        held = out * 2
        also = held + out
    return (held * out).mean() + (also * out).sum() + (out.detach() * out).sum()


def odd_shapes(model, data):
    out = model(data["x"])
    flags = torch.zeros(6, dtype=torch.bool)
    flags[1::2] = True
    scattered = torch.zeros(6, 3).to(out).scatter(1, data["c"][:, None], out[:, :1])
    added = torch.zeros(4, 3).to(out).index_add(0, data["c"], out)
    masked = out.masked_fill(flags[:, None], -2.0)
    masked[0, 1:] += 3 * out[2, :2]
    masked[:, 2] = masked[:, 2].clone() * out[:, 0]
    parts = torch.stack([out.split([2, 4])[0][1], out[3]])
    return (
        scattered.pow(2).sum()
        + added.tanh().sum()
        + masked.pow(2).mean()
        + parts.roll(1, 0).cumsum(1).prod()
        + torch.einsum("ij,ik->jk", out, data["x"]).tril().sum()
        + out.gather(1, data["c"][:, None]).sum()
        + out[data["c"], :].max(1)[0].sum()
        + out.sort(0, descending=True)[0][0].sum()
        + out.topk(2, 1)[0].prod()
        + out.median(0)[0].sum()
        + out.std(1).sum()
        + out.var()
        + torch.linalg.norm(out)
        + torch.cdist(out, out + 1).sum()
        + F.normalize(out * 0).sum()  # a norm at 0
        + F.pad(out, (1, 2, 0, 1), value=0.5).logsumexp(1).sum()
        + torch.where(data["y"] > 0, out[:, 0], out[:, 1]).amax()
        + F.unfold(out.reshape(1, 1, 6, 3), 2).sum()
        + out.repeat(2, 1).T.diagonal().sum()
        + torch.linalg.inv(out[:3] + 3 * torch.eye(3).to(out)).sum()
        + sum(p.pow(2).sum() for p in model.parameters())
    )


@pytest.mark.parametrize("loss", [cox, without_derivatives, odd_shapes])
def test_losses_of_other_operators(loss):
    assert_exact(*in_both(seeded(nn.Linear, 4, 3), loss, rows()), 1e-10)


# Modules


def lenet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


def batch_norms():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5, momentum=0.3, affine=False),
        nn.Linear(5, 4),
        nn.BatchNorm1d(4, track_running_stats=False),
    )


def other_norms():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=2, groups=3, dilation=2),
        nn.GroupNorm(2, 6),
        nn.InstanceNorm2d(6, affine=True),
        nn.ELU(),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.Flatten(),
        nn.LayerNorm(36),
        nn.Linear(36, 3),
        nn.RMSNorm(3),
    )


def odd_convolutions():
    return nn.Sequential(
        nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1, groups=3),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.Upsample(scale_factor=2),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.ReflectionPad2d(1),
        nn.Conv2d(6, 12, (3, 1), padding="same", groups=6),
        nn.PixelShuffle(2),
        nn.PReLU(3),
        nn.Upsample(size=(9, 7), mode="bilinear"),
        nn.AvgPool2d(2, 2, 1, count_include_pad=False),
        nn.Flatten(2),
        nn.Conv1d(3, 4, 3, 2, 1),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(11, 4, padding_idx=0)
        self.layers = kind(4, 3, 2, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        outputs, last = self.layers(self.embedding(tokens))
        return self.head(outputs[:, -1]) + (last[0] if isinstance(last, tuple) else last).mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, tokens):
        x = self.layer(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        x, shares = self.attention(x, x, x)
        heads = x.reshape(len(x), -1, 2, 2).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        nothing = torch.zeros(5, 5, dtype=torch.bool)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, attn_mask=nothing)
        x = x.transpose(1, 2).flatten(2) + shares.mean()
        return (x @ self.embedding.weight.T).mean(1)[:, :3]  # the same weight once more


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 3)
        self.out = nn.Linear(3, 4)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.clone())
        self.again = self.into
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x):
        return self.again(self.out(self.into(x)) * self.scale)


MODULES = {
    "dense": (nn.Linear, (4, 1), mean_square, rows),
    "lenet": (lenet, (), cross_entropy, images),
    "batch-norms": (batch_norms, (), cross_entropy, images),
    "other-norms": (other_norms, (), cross_entropy, images),
    "odd-convolutions": (odd_convolutions, (), cross_entropy, images),
    "lstm": (Recurrent, (nn.LSTM,), cross_entropy, words),
    "gru": (Recurrent, (nn.GRU,), cross_entropy, words),
    "rnn": (Recurrent, (nn.RNN,), cross_entropy, words),
    "encoder": (Encoder, (), cross_entropy, words),
    "tied": (Tied, (), cross_entropy, rows),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, given, loss, data = MODULES[name]
    assert_exact(*in_both(seeded(make, *given), loss, data()), 1e-10)


@pytest.mark.parametrize("name", ["dense", "lenet", "batch-norms", "encoder"])
def test_modules_in_float32(name):
    make, given, loss, data = MODULES[name]
    assert_exact(*in_both(seeded(make, *given), loss, data(), "float32"), 1e-5)


@pytest.mark.parametrize("name", ["batch-norms", "encoder"])
def test_modules_in_evaluation(name):
    make, given, loss, data = MODULES[name]
    assert_exact(*in_both(seeded(make, *given), loss, data(), training=False), 1e-10)


@pytest.mark.parametrize(
    ("make", "data"), [(batch_norms, images), (VisionTransformer, images)], ids=["cnn", "vit"]
)
def test_clients_with_parameters_of_their_own_are_mapped(make, data):
    clients = [data(seed) for seed in range(3)]
    for pair in over_clients(seeded(make), cross_entropy, clients, shift=0.1):
        assert_exact(*pair, 1e-10)


def test_equal_maxima_have_pytorchs_gradient():
    """Ties are frequent behind ReLU, and each library has its own rule for them."""

    def loss(model, data):
        maps = torch.round(model(data["x"]).clamp(0, 1) * 2) + model(data["x"])[:, :, :1] * 0
        maps = model.weight.reshape(1, 1, 4, 3) * 0 + maps.detach()[:1, :1, :4, :3] + model.weight
        first = F.max_pool2d(maps, 2, 1)
        return (first * torch.arange(6.0).to(maps).reshape(1, 1, 3, 2)).sum() + maps.amax()

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, 1, 4, 3))

        def forward(self, x):
            return x

    assert_exact(*in_both(Table(), loss, images()), 1e-12)


def test_softplus_and_attention_far_out_have_no_nan():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1000.0, -1000.0, 0.0, math.pi]))

    def loss(model, data):
        x = model.weight * data["x"][0].abs()
        return (
            F.softplus(x).sum() + F.logsigmoid(x).sum() + x.norm() * 0 + torch.relu(x).sqrt().sum()
        )

    (value, slopes, _), expected = in_both(Scale(), loss, rows())
    assert np.isfinite(value)
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    np.testing.assert_allclose(slopes["weight"][:2], expected[1]["weight"][:2], rtol=1e-12)


def test_the_names_are_those_of_torchvisions_resnet18():
    names = set(ResNet18(width=2).state_dict())
    assert len(names) == 122
    assert {"conv1.weight", "layer2.0.downsample.1.running_var", "fc.bias"} <= names


def test_a_narrow_resnet18():
    module = seeded(ResNet18, 3, width=2)
    assert_exact(*in_both(module, cross_entropy, images(side=32, count=3)), 1e-9)


@pytest.mark.slow
def test_resnet18():
    module = seeded(ResNet18, 3)
    assert_exact(*in_both(module, cross_entropy, images(side=32, count=2)), 1e-8)


@pytest.mark.slow
def test_a_small_text_classifier_of_hugging_face():
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.BertConfig(
        50,
        16,
        2,
        2,
        32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    module = seeded(transformers.BertForSequenceClassification, config)

    def loss(model, data):
        return model(
            input_ids=data["x"], attention_mask=(data["x"] > 0).long(), labels=data["c"]
        ).loss

    assert_exact(*in_both(module, loss, words()), 1e-10)
    assert_exact(*in_both(module, loss, words(), training=False), 1e-10)
