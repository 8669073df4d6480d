"""Describes the costs of a model's stages on a device: measured, or computed and marked as such."""

from epd.profiles.analytic import Efficiency, analytic_profile
from epd.profiles.cost import Measurement, StageCost, StageTable, ValidRange, fit_table
from epd.profiles.host import HostCosts, Overhead, PromptRule
from epd.profiles.media import MediaRule, MediaWork
from epd.profiles.memory import MemoryLimits, MemoryNeeds, WorkerMemory
from epd.profiles.parallel import ShardedModel
from epd.profiles.profile import Profile

__all__ = [
    "Efficiency",
    "HostCosts",
    "Measurement",
    "MediaRule",
    "MediaWork",
    "MemoryLimits",
    "MemoryNeeds",
    "Overhead",
    "Profile",
    "PromptRule",
    "ShardedModel",
    "StageCost",
    "StageTable",
    "ValidRange",
    "WorkerMemory",
    "analytic_profile",
    "fit_table",
]
