"""The end of an open step that two sides land gradients in."""

from tensorstow.states.native_pipeline import UpdatePipeline


class Closing:
    """Closes a step of the pipeline when neither side will land any more gradients."""

    def __init__(self, pipeline: UpdatePipeline, sides: int) -> None:
        """Expect so many sides to say so, in each step."""
        self._pipeline = pipeline
        self._sides = sides
        self._said = 0

    def landed(self) -> None:
        """Say that one side has landed all of its gradients."""
        self._said += 1
        if self._said == self._sides:
            self._said = 0
            self._pipeline.close_step()
