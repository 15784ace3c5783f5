"""A package of a project: its modules import each other relatively, and its tasks are re-exported here."""

from .jobs import Trainer, describe, registered, score, short_of_food, timed, wake

__all__ = ["Trainer", "describe", "registered", "score", "short_of_food", "timed", "wake"]
