"""What is learned: a model as pure functions of its parameters, a loss, and the names of its parts."""

from fedtailor.task.kinds import Kind
from fedtailor.task.task import Block, Task

__all__ = ["Block", "Kind", "Task"]
