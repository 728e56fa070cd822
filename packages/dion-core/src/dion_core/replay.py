"""Steps that repeat what was recorded of an earlier one, so that the host does not work out again what stays the same.

A step launches the same kernels on the same buffers as the one before it, as long as nothing changes on the host: what
it reads of gradients and options lies in tables on the device. So while the second of two steps that are alike runs,
all it launches is written down (`recorder`), and which memory it takes for how long. Every later one does what was
written, in one block of memory, which is free between steps as the memory of a step is that runs as it is. After a
change that ends replays the first step is written down at once: it is likely that the next ones are alike.

What is written down: launches through `launching`, messages of groups, and operations of torch. Of these those that
cannot be done again are found while recording, and such steps go on as they are. What is launched otherwise is not
seen, so that transports, groups and orthogonalizers have to say that they do not (`replayable`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dion_core.recorder import Recording
from dion_core.tape import Tape

logger = logging.getLogger("dion_core")


class StepReplay:
    """Runs the device work of steps: as it is, and by replay where steps are alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._form: Hashable = None
        self._tape: Tape | None = None
        self._order: Sequence[int] = ()
        """In which buffers were placed when a step was written down last."""
        self._replayed, self._reason = False, ""

    def run(
        self,
        work: Callable[[], None],
        form: Hashable,
        arguments: tuple[Any, ...],
        foreign: Callable[[], Iterable[int]],
    ) -> None:
        """Does the work.

        Args:
            work: launches the same kernels on the same tensors as long as `form` is the same, but for those that are
                handed to `recording.varying`.
            form: whatever else the work depends on that is not read from the device.
            arguments: what is handed to `recording.varying`.
            foreign: gives the addresses of storages that may be others in the next step although the form is the same.
        """
        with self._on_device():
            if self._is_being_captured():  # by someone else, whose graph must not hold what is free between steps
                self._form, self._replayed = None, False  # the next step forgets; to free something now would disturb
                work()
                return
            in_inference_mode = torch.is_inference_mode_enabled()  # operations look otherwise there
            form, lasting = (form, self._stream(), in_inference_mode), self._replayed
            if form == self._form:
                lasting = True
            else:
                self.forget()
                self._form = form
            if self._tape is not None:
                self._replayed = self._tape.replay(arguments)
                if not self._replayed:  # nothing is done yet
                    self._refuse("there is no room for the memory of a step in one block")
                    work()
            elif self._reason or not lasting or in_inference_mode:
                work()
            else:
                recording = Recording(self._device, foreign(), self._order)
                self._tape = recording.record(work)
                self._order = recording.order
                self._refuse(recording.reason)

    def forget(self) -> None:
        """The next step is run as it is: what was recorded may not hold any more."""
        self._form, self._tape, self._replayed, self._reason = None, None, False, ""

    def _refuse(self, reason: str) -> None:
        """If there is a reason, steps of this form run as they are."""
        if reason:
            logger.info("steps are not replayed: %s", reason)
            self._tape, self._reason = None, reason

    def _on_device(self) -> AbstractContextManager[Any]:
        """Inside it the device of the step is the current one."""
        index = self._device.index
        if self._device.type != "cuda" or index is None or index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(index)

    def _is_being_captured(self) -> bool:
        """Whether what the current stream is given now becomes part of a graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _stream(self) -> int:
        """Where the work goes now: what is recorded goes there again."""
        stream: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        return stream
