"""Random numbers of PyTorch that follow a seed in one thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from fedsolve.errors import InvalidInput  # noqa: E402
from fedsolve.torch.randomness import seeded  # noqa: E402

x = torch.arange(24.0).reshape(6, 4)


def attention():
    torch.nn.MultiheadAttention(4, 2, dropout=0.5)(x, x, x)


def rows_of_a_loader():
    return torch.cat(list(torch.utils.data.DataLoader(x, batch_size=2, shuffle=True)))


def attended():
    query = x.reshape(1, 1, 6, 4)
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def recurrent():
    weights = torch.Generator().manual_seed(0)
    net = nn.LSTM(4, 3, num_layers=2, dropout=0.5)
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.uniform_(-1, 1, generator=weights)
    return net(x)[0]


DRAWS = {
    "dropout": lambda: F.dropout(x),
    "dropout of channels": lambda: F.dropout2d(x.reshape(1, 6, 2, 2)),
    "alpha dropout": lambda: F.alpha_dropout(x, training=True),
    "rrelu": lambda: F.rrelu(-x - 1, training=True),
    "gumbel": lambda: F.gumbel_softmax(x),
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(1000, (5,)),
    "randint from": lambda: torch.randint(7, 1000, (5,)),
    "rand_like": lambda: torch.rand_like(x),
    "randint_like": lambda: torch.randint_like(x, 3, 1000),
    "randperm": lambda: torch.randperm(30),
    "normal": lambda: torch.normal(0.0, 1.0, (5,)),
    "multinomial": lambda: torch.multinomial(torch.ones(100), 5),
    "in place": lambda: torch.empty(5).exponential_(),
    "out": lambda: torch.rand(5, out=torch.empty(5)),
    "distribution": lambda: torch.distributions.Gamma(2.0, 1.0).sample((5,)),
    "order of a loader": rows_of_a_loader,
    "attention": attended,
    "recurrent": recurrent,
    "native dropout": lambda: torch.native_dropout(x, 0.5, True)[0],
}


def drawn(draw, seed):
    with seeded(seed):
        return draw()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_draws_follow_the_seed_and_leave_the_common_generator(draw):
    before = torch.get_rng_state()
    first, again, other = drawn(draw, 3), drawn(draw, 3), drawn(draw, 4)
    assert first.equal(again)
    assert not first.equal(other)
    assert torch.get_rng_state().equal(before)
    assert not draw().equal(draw())  # it is random by itself
    torch.set_rng_state(before)


def test_draws_within_inference_mode():
    def draw():
        with torch.inference_mode():
            return torch.dropout(x, 0.5, True) + F.alpha_dropout(x, training=True)

    before = torch.get_rng_state()
    assert drawn(draw, 3).equal(drawn(draw, 3))
    assert not drawn(draw, 3).equal(drawn(draw, 4))
    assert torch.get_rng_state().equal(before)


def test_draws_of_two_operators_differ():
    with seeded(3):
        assert not torch.rand(5).equal(torch.rand(5))


def test_threads_draw_what_they_draw_alone():
    def draw(seed):
        with seeded(seed):
            return torch.stack([F.dropout(torch.ones(50)) for _ in range(40)])

    alone = [draw(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(draw, range(8)))
    assert all(a.equal(b) for a, b in zip(alone, together, strict=True))


def test_gradients_follow_the_mask_of_the_forward_pass():
    net = nn.Linear(4, 3)
    with seeded(5):
        F.dropout(net(x)).sum().backward()
    with seeded(5):
        kept = F.dropout(torch.ones(6, 3))
    torch.testing.assert_close(net.bias.grad, kept.sum(0))


def test_a_users_own_generator_stays():
    own = torch.Generator().manual_seed(1)
    with seeded(3):
        found = torch.rand(5, generator=own)
    assert found.equal(torch.rand(5, generator=torch.Generator().manual_seed(1)))


def test_an_operator_that_takes_no_generator_raises():
    query = x.reshape(1, 1, 6, 4)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with seeded(3), pytest.raises(InvalidInput, match=r"flash_attention.* no torch\.Generator"):
        attend(query, query, query, 0.5)
    with seeded(3):
        attend(query, query, query, 0.0)
