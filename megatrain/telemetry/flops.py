"""What a step computes, counted by its parameters."""


def model_tflops(parameters: int, trained: int, tokens: int, seconds: float) -> float:
    """1e12 floating-point operations a second.

    A parameter takes 4 a token, and 2 more for its gradient if it is trained. Attention, and what
    is computed again, do not count.
    """
    return (4 * parameters + 2 * trained) * tokens / seconds / 1e12
