"""The mean as a product of factors, with simulated ranks: what one step gives, and what many add up to."""

import pytest
import torch
from kernel_backends import SETS, computed_by, needs_library

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.values import Values
from ddp_quant_hooks.kernels import Layout, torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from ddp_quant_hooks.kernels.rotation import signs
from ddp_quant_hooks.lowrank.factors import Factors, arrange, matrix_shape

INT4 = Layout("int4", 32, rotate=True)
CPU = torch.device("cpu")


def exact_mean(rows):
    """Average rows in place, and return what each lost."""
    mean = torch.stack(rows).mean(0)
    for row in rows:
        row.copy_(mean)
    return [torch.zeros_like(mean) for _ in rows]


def rounded_mean(rows):
    """Average rows in place as two hosts do, each rounded once, and return what each lost."""
    messages, lost = [], []
    for row in rows:
        messages.append(torch.empty(INT4.message_bytes(row.numel()), dtype=torch.uint8))
        lost.append(torch.empty_like(row, dtype=torch.bfloat16))
        kernels.encode(row, messages[-1], INT4, new_residual=lost[-1])
    for row in rows:
        kernels.decode(messages, INT4, row)
    return [one.float() for one in lost]


class Ranks:
    """Ranks that average gradients of some shapes, one step after another."""

    def __init__(self, shapes, rank, count=2, mean=rounded_mean, backends=None):
        self.arrangement, self.mean = arrange(shapes, rank), mean
        self.length = sum(rows * columns for rows, columns in shapes)
        self.backends = backends or [None] * count
        firsts = [signs(length, CPU) for length in self.arrangement.right_lengths]
        self.rights = [torch.cat([*firsts, torch.empty(0)]) for _ in range(count)]
        self.residuals = [torch.zeros(self.length, dtype=torch.bfloat16) for _ in range(count)]

    def step(self, gradients):
        """Return every rank's mean; ``gradients`` stay as they are."""
        buffers = [one.clone() for one in gradients]
        new = [torch.empty_like(one) for one in self.residuals]
        every = [
            Factors(self.arrangement, Values([buffer]), residual, left_over, right, right)
            for buffer, residual, left_over, right in zip(
                buffers, self.residuals, new, self.rights, strict=True
            )
        ]
        lost = self.mean(self._each(every, lambda one, _: one.left_row()))
        lost = self.mean(self._each(every, lambda one, rank: one.right_row(lost[rank])))
        self._each(every, lambda one, rank: one.restore(lost[rank]))
        self.residuals = new
        return buffers

    def _each(self, every, do):
        results = []
        for rank, one in enumerate(every):
            if self.backends[rank] is None:
                results.append(do(one, rank))
            else:
                with computed_by(self.backends[rank]):
                    results.append(do(one, rank))
        return results


def gradients_of(length, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for _ in range(count)]


def alike(means):
    """Return whether all ranks have the same bits."""
    return all(torch.equal(one.view(torch.uint8), means[0].view(torch.uint8)) for one in means)


SHAPES = [(48, 80), (1, 48), (96, 40), (7, 3), (40, 40)]


def test_no_section_is_empty_and_the_rest_goes_along_with_the_last_one():
    large, bias = (4096, 4096), (1, 4096)
    for shapes, matrices in (
        ([large], [1]),
        ([bias, large], [1]),
        ([large, bias, large], [1, 1]),
        ([bias], [0]),
    ):
        sections = arrange(shapes, 8).in_sections()
        assert [len(one.matrices) for one in sections] == matrices
        assert [len(one.rest) for one in sections] == [0] * (len(sections) - 1) + [shapes.count(bias)]


def test_matrices_that_are_worth_it_get_factors_and_the_rest_does_not():
    arrangement = arrange(SHAPES, 8)
    assert [(one.start, one.rows, one.columns) for one in arrangement.matrices] == [
        (0, 48, 80),
        (3888, 96, 40),
        (7749, 40, 40),
    ]
    assert [(span.start, span.stop) for span in arrangement.rest] == [(3840, 3888), (7728, 7749)]
    assert [(one.start, one.rows) for one in arrange(SHAPES[2:], 11).matrices] == [(0, 96)]
    assert not arrange(SHAPES, 100).matrices
    assert arrange([], 1).rest == ()
    assert arrange([(0, 5)], 1) == arrange([], 1)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(6, 4), (6, 4)),
        (torch.empty(6, 4).t(), (6, 4)),  # as it is in memory
        (torch.empty(6, 4, 3, 3), (6, 36)),
        (torch.empty(6, 4, 3, 3).contiguous(memory_format=torch.channels_last), (6, 36)),
        (torch.empty(1, 5, 7), (5, 7)),
        (torch.empty(5), (5, 1)),
        (torch.empty(()), (1, 1)),
        (torch.empty(0, 3), (0, 3)),
    ],
)
def test_a_parameter_is_a_matrix_as_its_memory_has_it(tensor, expected):
    assert matrix_shape(tensor.shape, tensor.stride()) == expected


def test_repeated_steps_come_close_to_the_best_approximation():
    """Subspace iteration, warm from step to step: without residuals, the error nears that of the SVD."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 40, generator=generator))[0] for size in (64, 96))
    matrix = left @ torch.diag(0.7 ** torch.arange(40.0)) @ right.T
    ranks = Ranks([(64, 96)], 6, mean=exact_mean)
    for _ in range(6):
        ranks.residuals = [torch.zeros_like(one) for one in ranks.residuals]
        mean, _ = ranks.step([matrix.flatten()] * 2)
    best = torch.linalg.svdvals(matrix)[6:].norm()
    # Rows and columns are made alike first, so that it is the best approximation of another matrix.
    assert (mean.view(64, 96) - matrix).norm() <= 1.2 * best


def test_matrices_of_a_low_rank_are_averaged_exactly():
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(64, 2, generator=generator) @ torch.randn(2, 96, generator=generator) for _ in range(2)
    ]
    ranks = Ranks([(64, 96)], 8, mean=exact_mean)  # half of the columns depend on the others
    mean, _ = ranks.step([part.flatten() for part in parts])
    exact = (parts[0] + parts[1]).flatten() / 2
    # Products of 96 numbers, a basis, products of 64 and of 8, in fp32.
    assert (mean - exact).norm() <= (96 + 64 + 8) * 2.0**-24 * exact.norm()


@pytest.mark.parametrize("mean", [exact_mean, rounded_mean])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_step_leaves_out_is_kept_for_the_next(mean, dtype):
    """The sum of all means and the ranks' residuals is the sum of all gradients, but for rounding."""
    ranks = Ranks(SHAPES, 4, mean=mean)
    total, sums, bound = torch.zeros(9349, dtype=torch.float64), torch.zeros(9349, dtype=torch.float64), 0.0
    for step in range(10):
        gradients = [one.to(dtype) for one in gradients_of(9349, seed=step)]
        means = ranks.step(gradients)
        assert alike(means)
        total += sum(one.double() for one in gradients) / 2
        sums += means[0].double()
        kept = sum(one.double() for one in ranks.residuals) / 2
        # Residuals and what a factor has lost are rounded to bf16, means to their dtype.
        largest = max(float(one.float().abs().max()) for one in (*ranks.residuals, *means))
        bound += 4 * 2.0**-8 * largest
        assert (sums + kept - total).abs().max() <= bound, step
    assert sums.norm() > 0.5 * total.norm()


def test_residuals_stay_bounded():
    ranks = Ranks([(64, 96)], 4)
    norms = []
    for step in range(400):
        ranks.step(gradients_of(64 * 96, seed=step))
        norms.append(ranks.residuals[0].float().norm())
    assert max(norms[200:]) <= 1.05 * max(norms[:200])


def test_means_depend_on_messages_alone():
    """Ranks whose factors differ, as after one of them has dropped a step, do not drift apart."""
    ranks = Ranks(SHAPES, 4)
    ranks.step(gradients_of(9349))
    ranks.rights[1] = torch.randn(ranks.rights[1].shape, generator=torch.Generator().manual_seed(1))
    assert alike(ranks.step(gradients_of(9349, seed=1)))
    assert alike([ranks.rights[0], ranks.rights[1]])


@needs_library
def test_ranks_on_unlike_processors_end_with_the_same_bits():
    backends = [CpuKernels(SETS[0]), CpuKernels(SETS[-1]), torch_ops]
    ranks, same = Ranks(SHAPES, 4, 3, backends=backends), Ranks(SHAPES, 4, 3)
    for step in range(3):
        gradients = gradients_of(9349, 3, seed=step)
        means = ranks.step(gradients)
        assert alike([*means, *same.step(gradients)]), step
        assert all(map(torch.equal, ranks.residuals, same.residuals))


def test_zero_gradients_stay_zero_and_do_no_harm():
    ranks = Ranks(SHAPES, 4)
    for _ in range(3):
        means = ranks.step([torch.zeros(9349)] * 2)
        assert not any(mean.any() for mean in means)
    gradients = gradients_of(9349)
    gradients[0][:3840] = gradients[1][:3840] = 0.0  # a matrix alone
    mean, _ = ranks.step(gradients)
    assert mean.isfinite().all()
    assert not mean[:3840].any()
    mean, _ = ranks.step(gradients_of(9349, seed=1))
    assert mean[:3840].any()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 100, 3839, 3850, 9000])
def test_a_value_that_is_not_finite_is_seen_by_all_ranks(value, place):
    ranks = Ranks(SHAPES, 4)
    ranks.step(gradients_of(9349))
    gradients = gradients_of(9349, seed=1)
    gradients[1][place] = value
    means = ranks.step(gradients)
    for mean in means:
        assert mean[place].isnan()
        if place < 3840:
            assert mean[:3840].isnan().all()
            assert mean[3840:].isfinite().all()


@pytest.mark.parametrize("exponent", [-90, -40, 60, 90])
@pytest.mark.parametrize("mean", [exact_mean, rounded_mean])
def test_gradients_times_a_power_of_two_have_the_same_mean_times_it(exponent, mean):
    """As with any loss scale: no product overflows, and none becomes subnormal."""
    ranks, scaled = (Ranks([(64, 96), (1, 40)], 4, mean=mean) for _ in range(2))
    for step in range(3):
        gradients = gradients_of(64 * 96 + 40, seed=step)
        expected = ranks.step(gradients)[0] * 2.0**exponent
        assert torch.equal(scaled.step([2.0**exponent * one for one in gradients])[0], expected), step


def test_large_gradients_have_a_finite_mean():
    """The magnitudes of a row add up to 2^117, times 100 to 2^124."""
    ranks = Ranks([(64, 96), (1, 40)], 4)
    for step in range(3):
        (mean, _) = ranks.step([2.0**110 * one for one in gradients_of(64 * 96 + 40, seed=step)])
        assert mean.isfinite().all()
