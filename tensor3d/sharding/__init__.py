"""How parameters and activations are split over the cube, how they change hands, and the 3-D matrix product."""
