import pytest
import torch
from model import bodies
from model.plain import tiny
from ranks import RankPool

from distca.model.initialize import initialize
from distca.model.llama import Llama, on_meta
from distca.model.sizes import model_config


def weights_of(model: Llama, seed: int = 3) -> dict[str, torch.Tensor]:
    initialize(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_they_have_the_size_that_was_asked_for() -> None:
    config = model_config("debug")
    model = on_meta(config)
    for name, weight in weights_of(model).items():
        if "norm" in name:
            assert (weight == 1).all(), name
        else:
            small = "wo" in name or "w2" in name
            std = 0.02 / (2 * config.layers) ** 0.5 if small else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5, name


def test_they_depend_on_seed_and_name_alone() -> None:
    config = tiny()
    want = weights_of(on_meta(config))
    torch.manual_seed(7)
    assert_equal(weights_of(Llama(config)), want)
    stages = weights_of(on_meta(config, 0, 1)) | weights_of(on_meta(config, 1, 3))
    assert_equal({name: stages[name] for name in want}, want)
    deeper = weights_of(on_meta(tiny(layers=5)))
    assert torch.equal(deeper["seams.1.before.qkv.wq.weight"], want["seams.1.before.qkv.wq.weight"])
    other = weights_of(on_meta(config), seed=4)
    matrices = [weight for weight in (*want.values(), *other.values()) if weight.ndim == 2]
    assert len({weight[0, 0].item() for weight in matrices}) == len(matrices)


def test_tied_weights_stay_one() -> None:
    model = on_meta(tiny(tied=True))
    initialize(model, 3)
    first, *_, last = model.seam_list
    assert last.head.output.weight is first.embed.weight


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=["2", "3 uneven", "2 x tp 2"])
def test_they_do_not_depend_on_the_mesh(pool: RankPool, shape: tuple[int, ...], tied: bool) -> None:
    config = tiny(qk_norm=True, tied=tied)
    want = weights_of(on_meta(config))
    ranks = shape[0] * (shape[1] if len(shape) > 1 else 1)
    for found in pool.run(bodies.weights, config, shape, ranks=ranks):
        assert_equal(found, want)
