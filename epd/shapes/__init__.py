"""Draws the shapes world: videos with a known truth, and questions about them."""

from epd.shapes.footage import LEVELS, STILL, Footage, SceneRenderer, footage_level
from epd.shapes.questions import Question, QuestionKind, make_questions
from epd.shapes.world import COLOURS, SHAPES, Scene, SceneObject, make_scene

__all__ = [
    "COLOURS",
    "LEVELS",
    "SHAPES",
    "STILL",
    "Footage",
    "Question",
    "QuestionKind",
    "Scene",
    "SceneObject",
    "SceneRenderer",
    "footage_level",
    "make_questions",
    "make_scene",
]
