"""Simulates discrete events and drives the live system's own policies."""

from epd.encode.sharding import Sharding
from epd.simulate.deployment import Deployment
from epd.simulate.records import SimulationResult
from epd.simulate.requests import Job, JobMaker
from epd.simulate.simulation import Simulation

__all__ = ["Deployment", "Job", "JobMaker", "Sharding", "Simulation", "SimulationResult"]
