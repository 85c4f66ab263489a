class Simulation: pass
def simulate(): pass
