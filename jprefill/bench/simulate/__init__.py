"""`jprefill simulate`: the scheduler and index that serve, in virtual time, on devices that are not there."""
