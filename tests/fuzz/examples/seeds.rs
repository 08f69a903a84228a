//! Writes the good inputs from which fuzzing begins into `corpus/<target>/`.

use std::{fs, io};

use tidewatch_tests::{fuzz, paths};

fn main() -> io::Result<()> {
    for fuzz::Target { name, .. } in fuzz::TARGETS {
        let folder = paths::workspace().join("tests/fuzz/corpus").join(name);
        fs::create_dir_all(&folder)?;
        for (number, seed) in fuzz::seeds(name).iter().enumerate() {
            fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
