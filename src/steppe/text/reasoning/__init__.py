"""What a model thinks before it answers, told apart from the answer.

``families`` knows from a model's chat template how it marks its reasoning; ``splitter`` takes the
marked text apart as it arrives. Behind ``text.pipeline``, before ``text.tools``.
"""
