"""`linattn-edge bench`: what a token costs, measured so that the figures can be trusted and quoted.

clock, statistics and turns are how times are taken; suites is what is measured; peers does the same by other means;
roofline says what the memory allows; record is what comes out; tables, files, page and figure show it; comparison holds
it beside an older run. docs/benchmarking.md describes the method.
"""
