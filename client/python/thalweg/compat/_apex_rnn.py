"""Implements `apex.RNN`: recurrent networks of cells that keep their hidden state.

They are made of torch's operations, so thalweg.amp casts them. A step takes about as long as with
torch's cells, not as with its fused networks. As in apex, `dropout` and `batch_first` are accepted
and change nothing, and the first dimension of inputs is time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]

Gates = Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]


def _lstm(of_input: Tensor, of_hidden: Tensor, hidden: list[Tensor]) -> list[Tensor]:
    enter, forget, cell, leave = (of_input + of_hidden).chunk(4, 1)
    kept = forget.sigmoid() * hidden[1] + enter.sigmoid() * cell.tanh()
    return [leave.sigmoid() * kept.tanh(), kept]


def _gru(of_input: Tensor, of_hidden: Tensor, hidden: list[Tensor]) -> list[Tensor]:
    reset, update, new = of_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = of_hidden.chunk(3, 1)
    candidate = (new + (reset + hidden_reset).sigmoid() * hidden_new).tanh()
    return [candidate + (update + hidden_update).sigmoid() * (hidden[0] - candidate)]


def _relu(of_input: Tensor, of_hidden: Tensor, _: list[Tensor]) -> list[Tensor]:
    return [(of_input + of_hidden).relu()]


def _tanh(of_input: Tensor, of_hidden: Tensor, _: list[Tensor]) -> list[Tensor]:
    return [(of_input + of_hidden).tanh()]


class RNNCell(nn.Module):
    """One layer, with the names of apex's parameters, that remembers its hidden state.

    Args:
        input_size, hidden_size: numbers of features.
        gates: one of the functions above.
        count: how many gates it has.
        states: how many tensors the hidden state has; the first one is the output.
        bias: whether there are `b_ih` and `b_hh`.
        output_size: if not hidden_size, the output is projected by `w_ho`.
        multiplicative: the hidden state is multiplied by the input first (Krause et al., 2016).
    """

    b_ih: nn.Parameter | None
    b_hh: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        gates: Gates,
        count: int,
        states: int,
        *,
        bias: bool,
        output_size: int | None,
        multiplicative: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.output_size = hidden_size if output_size is None else output_size
        self.n_hidden_states = states
        self._gates = gates
        self.w_ih = nn.Parameter(torch.empty(count * hidden_size, input_size))
        self.w_hh = nn.Parameter(torch.empty(count * hidden_size, self.output_size))
        if self.output_size != hidden_size:
            self.w_ho = nn.Parameter(torch.empty(self.output_size, hidden_size))
        for name in ("b_ih", "b_hh"):
            vector = nn.Parameter(torch.empty(count * hidden_size)) if bias else None
            self.register_parameter(name, vector)
        self._multiplicative = multiplicative
        if multiplicative:
            self.w_mih = nn.Parameter(torch.empty(self.output_size, input_size))
            self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.hidden: list[Tensor] = []
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all parameters uniformly from ±1/√hidden_size."""
        bound = 1 / math.sqrt(self.hidden_size)
        for param in self.parameters():
            param.uniform_(-bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Makes the hidden state zeros, unless there is one for `bsz` sequences."""
        if self.hidden and self.hidden[0].size(0) == bsz:
            return
        sizes = [self.output_size, self.hidden_size][: self.n_hidden_states]
        self.hidden = [self.w_ih.new_zeros(bsz, size) for size in sizes]

    def reset_hidden(self, bsz: int) -> None:
        """Makes the hidden state zeros."""
        self.hidden = []
        self.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Ends backpropagation at the present hidden state. Raises RuntimeError without one."""
        if not self.hidden:
            raise RuntimeError("detach_hidden() was called without a hidden state, expected one")
        self.hidden = [state.detach() for state in self.hidden]

    def forward(self, input: Tensor) -> list[Tensor]:
        """Takes one step of time; returns the new hidden state."""
        self.init_hidden(input.size(0))
        seen = self.hidden[0]
        if self._multiplicative:
            seen = F.linear(input, self.w_mih) * F.linear(seen, self.w_mhh)
        self.hidden = self._gates(
            F.linear(input, self.w_ih, self.b_ih), F.linear(seen, self.w_hh, self.b_hh), self.hidden
        )
        if self.output_size != self.hidden_size:
            self.hidden[0] = F.linear(self.hidden[0], self.w_ho)
        return self.hidden


class _Layers(nn.Module):
    """Does what all networks here do with their layers."""

    rnns: Any  # a ModuleList

    def reset_parameters(self) -> None:
        """Draws all parameters."""
        for rnn in self.rnns:
            rnn.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Makes hidden states zeros where there are none for `bsz` sequences."""
        for rnn in self.rnns:
            rnn.init_hidden(bsz)

    def reset_hidden(self, bsz: int) -> None:
        """Makes hidden states zeros."""
        for rnn in self.rnns:
            rnn.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Ends backpropagation at the present hidden states."""
        for rnn in self.rnns:
            rnn.detach_hidden()


class stackedRNN(_Layers):
    """Layers, each of which takes the outputs of the one below."""

    def __init__(self, layers: list[RNNCell]) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(layers)

    def forward(
        self, input: Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """Returns outputs (time, batch, features), and each tensor of the hidden state.

        That is of shape (layer, batch, features) after the last step, or with `collect_hidden` a
        list of these by time. `reverse` begins at the end of the sequence; unlike apex's, the
        hidden state without `collect_hidden` is then the one after all steps as well.
        """
        steps = range(input.size(0))
        seen: list[list[Tensor]] = []
        for time in reversed(steps) if reverse else steps:
            value, states = input[time], []
            for rnn in self.rnns:
                states.append(rnn(value))
                value = states[-1][0]
            seen.append([torch.stack(list(each)) for each in zip(*states, strict=True)])
        by_time = list(reversed(seen)) if reverse else seen
        outputs = torch.stack([each[0][-1] for each in by_time])
        if collect_hidden:
            return outputs, [list(each) for each in zip(*by_time, strict=True)]
        return outputs, list(seen[-1])


class bidirectionalRNN(_Layers):
    """Two stacks, one of which begins at the end; outputs and states have both, side by side."""

    def __init__(self, forwards: stackedRNN, backwards: stackedRNN) -> None:
        super().__init__()
        self.fwd, self.bckwrd = forwards, backwards
        self.rnns = nn.ModuleList([forwards, backwards])

    def forward(
        self, input: Tensor, collect_hidden: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns what stackedRNN does, with twice the features."""
        ahead, states = self.fwd(input, collect_hidden)
        back, others = self.bckwrd(input, collect_hidden, reverse=True)
        pairs = zip(states, others, strict=True)
        return torch.cat([ahead, back], -1), tuple(_join(one, other) for one, other in pairs)


def _join(one: Any, other: Any) -> Any:  # noqa: ANN401
    if isinstance(one, Tensor):
        return torch.cat([one, other], -1)
    return [torch.cat(pair, -1) for pair in zip(one, other, strict=True)]


def _builder(
    gates: Gates, count: int, states: int, doc: str, *, multiplicative: bool = False
) -> Callable[..., nn.Module]:
    def build(  # noqa: PLR0917 - apex's order
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> nn.Module:
        def stack() -> stackedRNN:
            width = hidden_size if output_size is None else output_size
            return stackedRNN(
                [
                    RNNCell(
                        size,
                        hidden_size,
                        gates,
                        count,
                        states,
                        bias=bias,
                        output_size=output_size,
                        multiplicative=multiplicative,
                    )
                    for size in [input_size] + [width] * (num_layers - 1)
                ]
            )

        return bidirectionalRNN(stack(), stack()) if bidirectional else stack()

    build.__doc__ = f"{doc} See stackedRNN for what it returns."
    return build


LSTM = _builder(_lstm, 4, 2, "Returns a network of torch.nn.LSTMCell's formulas.")
GRU = _builder(_gru, 3, 1, "Returns a network of torch.nn.GRUCell's formulas.")
ReLU = _builder(_relu, 1, 1, "Returns a network of torch.nn.RNNCell's formulas with relu.")
Tanh = _builder(_tanh, 1, 1, "Returns a network of torch.nn.RNNCell's formulas with tanh.")
mLSTM = _builder(
    _lstm,
    4,
    2,
    "Returns a network of multiplicative LSTM cells (Krause et al., 2016).",
    multiplicative=True,
)
