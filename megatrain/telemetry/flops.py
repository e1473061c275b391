"""The arithmetic of a step, counted by its parameters."""


def model_tflops(parameters: int, trained: int, tokens: int, seconds: float) -> float:
    """1e12 floating-point operations a second.

    A parameter takes 4 a token that it computes with, and 2 more for its gradient if it is trained.
    Of experts count those that a token chooses; attention, and what is computed again, do not.
    """
    return (4 * parameters + 2 * trained) * tokens / seconds / 1e12
