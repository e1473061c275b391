"""The arithmetic of a step, counted by parameters."""


def model_tflops(parameters: int, trained: int, tokens: int, seconds: float) -> float:
    """1e12 floating-point operations a second.

    A parameter takes 4 operations a token, and 2 more for its gradient if it is trained.
    Only the experts that a token chooses count; attention and recomputation do not.
    """
    return (4 * parameters + 2 * trained) * tokens / seconds / 1e12
