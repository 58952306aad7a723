"""What one step has to do: how many prompts and samples, how long they are, and which of them are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hrl.config.arithmetic import step_sizes
from hrl.config.ppo import PPOTrainerConfig
from hrl.models.flops import ModelFlops

#: Mean length over the longest that the configuration allows, where the caller does not say.
MEAN_OVER_LONGEST = 0.5


@dataclass(frozen=True)
class Workload:
    """The samples of one step.

    The length of a response at the quantile u of all responses is taken to be `longest_response * u ** tail`, the power
    being the one for which the mean is `response`. Responses that all reach the limit have power 0.

    Attributes:
        prompts: Prompts of a step.
        samples: Samples of a prompt.
        prompt: Mean tokens of a prompt.
        response: Mean tokens of a response.
        longest_response: Tokens at which a response is cut.
        teaching: Share of the groups whose samples differ in reward; rows of the others are not run in an update.
    """

    prompts: int
    samples: int
    prompt: float
    response: float
    longest_response: int
    teaching: float = 1.0

    @classmethod
    def of(
        cls, config: PPOTrainerConfig, prompt: float | None = None, response: float | None = None, teaching: float = 1.0
    ) -> Workload:
        """Return the workload of a run; lengths that are not given are a share of the longest allowed."""
        data, sizes = config.data, step_sizes(config)
        return cls(
            prompts=sizes.prompts,
            samples=sizes.samples,
            prompt=min(prompt or MEAN_OVER_LONGEST * data.max_prompt_length, data.max_prompt_length),
            response=min(response or MEAN_OVER_LONGEST * data.max_response_length, data.max_response_length),
            longest_response=data.max_response_length,
            teaching=teaching,
        )

    @property
    def sequences(self) -> int:
        """Prompts × samples."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Tokens of all rows, the prompt counted with each of its samples, as `perf/total_num_tokens` does."""
        return self.sequences * (self.prompt + self.response)

    @property
    def tail(self) -> float:
        """The power of the quantiles."""
        return self.longest_response / self.response - 1.0

    def alive(self, position: float) -> float:
        """Return the share of the responses that are longer than a number of tokens."""
        if position >= self.longest_response:
            return 0.0
        return 1.0 if self.tail < 1e-9 else 1.0 - (position / self.longest_response) ** (1.0 / self.tail)

    @cached_property
    def squared_response(self) -> float:
        """Mean of the squared length of a response."""
        return self.longest_response**2 / (2.0 * self.tail + 1.0)

    @property
    def running_response(self) -> float:
        """Mean tokens so far of the responses that run at one time, where finished ones are replaced by new ones.

        At a random moment a response is met in proportion to its length, and on average in its middle.
        """
        return self.squared_response / (2.0 * self.response)

    def copies(self, ranks: int) -> float:
        """Return how many ranks compute a prompt: one, unless there are fewer prompts than ranks."""
        return min(float(self.samples), max(1.0, ranks / self.prompts))

    def packed_tokens(self, ranks: int) -> float:
        """Return the tokens of a pass over all rows: a prompt counts once for each rank that has samples of it."""
        return self.prompts * self.copies(ranks) * self.prompt + self.sequences * self.response

    def pairs(self, ranks: int) -> float:
        """Return the query–key pairs of that pass: causal in the prompt, and of a response with all before it."""
        of_prompts = self.prompts * self.copies(ranks) * self.prompt**2 / 2
        return of_prompts + self.sequences * (self.prompt * self.response + self.squared_response / 2)

    def forward_flops(self, flops: ModelFlops, ranks: int) -> tuple[float, float]:
        """Return the FLOPs of a forward over all rows: those of the layers, and those of the head on responses."""
        tokens, pairs = self.packed_tokens(ranks), self.pairs(ranks)
        return flops.per_token * tokens + flops.per_pair * pairs, flops.per_head_token * self.sequences * self.response
