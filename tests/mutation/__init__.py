"""The mutation audit: small breaks of the code, each with the tests that must see it.

    make mutate                              # all of them
    make mutate ARGS="'mfu*' --jobs 1"       # some, by name
    make mutate ARGS=--list

`table/` holds the mutations, by area. A mutation that no test sees has survived: it says which test is missing.
"""
