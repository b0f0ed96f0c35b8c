"""One head size for kernels that need it: the smaller one is padded with zeros.

Zeros behind queries and keys change no score. Those behind values give zeros behind outputs, which
are cut off, and sum(grad_out * out) is the same with them. Everything has the head size last.
"""

from torch import Tensor
from torch.nn.functional import pad

from distca.attention.backends.base import Gradients, Saved


def one_head_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v with the larger of their two head sizes."""
    size = max(q.shape[-1], v.shape[-1])
    return _padded(q, size), _padded(k, size), _padded(v, size)


def one_head_size_saved(grad_out: Tensor, saved: Saved) -> tuple[Tensor, Saved]:
    """Returns grad_out and what was saved with the larger of their two head sizes."""
    q, k, v, out, lse = saved
    size = max(q.shape[-1], v.shape[-1])
    q, k, v, out, grad_out = (_padded(x, size) for x in (q, k, v, out, grad_out))
    return grad_out, Saved(q, k, v, out, lse)


def own_head_sizes(grads: Gradients, saved: Saved) -> Gradients:
    """Returns gradients with the head sizes of what was saved."""
    sizes = (x.shape[-1] for x in (saved.q, saved.k, saved.v))
    return Gradients(*(grad[..., :size] for grad, size in zip(grads, sizes, strict=True)))


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))
