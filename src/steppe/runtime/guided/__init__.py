"""Guided decoding: grammars compiled off the actor's thread, and the masks they give every step.

``compiler`` turns what a request asks for into a grammar that is ready to run, within limits of
time and size; ``limits`` refuses what those would find out too late; ``vocabulary`` tells the
grammar library what our tokens spell; ``state`` follows one sequence through its grammar.
"""
