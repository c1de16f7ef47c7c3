"""Many engines behind one face (seed 003): one vocabulary for an engine here, in a process beside
us, or at the other end of a network.
"""
