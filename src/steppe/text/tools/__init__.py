"""Tool calls, found in what a model writes.

``families`` knows from a model's chat template how it writes a call, and what an answer that must
be a call looks like; ``parser`` finds calls in a text as it arrives; ``calls`` is what a call is.
Behind ``text.reasoning``; nothing here knows HTTP.
"""
