//! Writes the seed inputs of all fuzz targets to `corpus/<target>/`, or to the folder given as an argument.

use std::{env, fs, io, path::PathBuf};

use tidewatch_tests::{fuzz, paths};

fn main() -> io::Result<()> {
    let corpus = env::args_os().nth(1).map_or_else(|| paths::workspace().join("tests/fuzz/corpus"), PathBuf::from);
    for fuzz::Target { name, .. } in fuzz::TARGETS {
        let folder = corpus.join(name);
        fs::create_dir_all(&folder)?;
        for (number, seed) in fuzz::seeds(name).iter().enumerate() {
            fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
