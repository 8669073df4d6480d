"""Draws the shapes world: videos with a known truth, and questions about them."""

from epd.shapes.questions import Question, QuestionKind, make_questions
from epd.shapes.world import COLOURS, SHAPES, Scene, SceneObject, SceneRenderer, make_scene

__all__ = [
    "COLOURS",
    "SHAPES",
    "Question",
    "QuestionKind",
    "Scene",
    "SceneObject",
    "SceneRenderer",
    "make_questions",
    "make_scene",
]
