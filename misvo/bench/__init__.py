"""The paper's experiments: sweeps that survive being killed, reports, profiles.

`config` reads a TOML file, `plan` cuts it into chunks, `work` runs a chunk, `sweep` drives them and `folder` keeps
what is done; `pool` is Ray. `results`, `tables`, `figures`, `page` and `report` turn folders into tables and pictures;
`profile` times the methods. Nothing below this room knows about files.
"""
