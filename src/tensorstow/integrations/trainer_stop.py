"""A signal that saves a checkpoint of transformers' Trainer, and ends the run on all ranks."""

from typing import Any

import transformers

from tensorstow.base.errors import OptionError
from tensorstow.base.signals import StopSignals, read_stop_signals
from tensorstow.doorkit.stop_point import StopPoint


class StopCallback(transformers.TrainerCallback):
    """``Trainer(callbacks=[StopCallback()])``: at a signal, save a checkpoint and end.

    After the next step all ranks save a checkpoint and raise SystemExit, whichever got the signal.
    An evaluation that is due comes first. ``train(resume_from_checkpoint=True)`` goes on from it.

    Args:
        stop_signals: The name of a signal, or a dict of exit statuses by names, as in ``AdamW``.
            Python handles signals in the main thread alone.

    Raises:
        OptionError: It is no signal.
    """

    def __init__(self, stop_signals: StopSignals = "SIGTERM") -> None:
        read_stop_signals(stop_signals)
        self._stop_signals = stop_signals
        self._stop_point = StopPoint()
        self._is_saved = False
        """Whether the checkpoint of the last step is complete."""

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: object,  # noqa: ARG002  # the callback's signature
        control: object,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Handle the signals, from now on.

        Args:
            args, state, control: The Trainer's.

        Raises:
            OptionError: This is not the main thread; or ``enable_jit_checkpoint=True`` was given,
                by which each rank decides alone when it saves.
        """
        if getattr(args, "enable_jit_checkpoint", False):
            message = (
                "enable_jit_checkpoint=True was given to a Trainer with a StopCallback, which saves"
                " at the signal too, on all ranks together. Leave one of both out."
            )
            raise OptionError(message)
        self._close()
        self._stop_point = StopPoint(self._stop_signals)

    def on_step_end(
        self,
        args: object,  # noqa: ARG002
        state: object,  # noqa: ARG002
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Ask for a checkpoint if the run ends with this step; collective."""
        self._stop_point.note_step()
        control.should_save |= self._stop_point.is_last()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Note that the checkpoint is complete: the run ends when all callbacks know it."""
        self._is_saved = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """End the run before another step."""
        self._end()

    def on_epoch_end(self, args: transformers.TrainingArguments, *_: Any, **__: Any) -> None:
        """End the run after the last step of an epoch, unless an evaluation of the epoch follows.

        Then it ends before the next step, and after the last epoch as if no signal had come.
        """
        if args.eval_strategy != "epoch":
            self._end()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore the handlers that were there."""
        self._close()

    def _end(self) -> None:
        """Raise SystemExit if the last step is saved; Trainers may save at other steps, too."""
        is_saved, self._is_saved = self._is_saved, False
        if is_saved:
            self._stop_point.end()

    def _close(self) -> None:
        self._stop_point.close()
        self._stop_point = StopPoint()
