//! Asks pkg-config where flash_attn is installed: what to link, and the rpath with which programs find the library.

use std::env;
use std::fs;
use std::process::{exit, Command};

const ADVICE: &str = "\
build.rs: flash_attn is not found. Install the core library (docs/building.md, \"The core alone\"), which needs neither
torch nor Python, and say where its pkg-config file is, by an absolute path:

    cmake --install <build> --prefix <prefix>
    PKG_CONFIG_PATH=<prefix>/lib/pkgconfig cargo run";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for name in ["PKG_CONFIG", "PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    for flag in words(&pkg_config("--libs")) {
        if let Some(folder) = flag.strip_prefix("-L") {
            // Not printed for the system's own folders, which need no rpath either.
            let folder = absolute(folder);
            println!("cargo:rustc-link-search=native={folder}");
            for argument in ["-rpath", &folder] {
                println!("cargo:rustc-link-arg=-Xlinker"); // unlike -Wl, takes commas in a name
                println!("cargo:rustc-link-arg={argument}");
            }
        } else if let Some(library) = flag.strip_prefix("-l") {
            println!("cargo:rustc-link-lib={library}");
        } else {
            println!("cargo:rustc-link-arg={flag}");
        }
    }
    // For tests/interface, which compares the declarations with the header of this very library.
    let include = absolute(&words(&pkg_config("--variable=includedir")).concat());
    println!("cargo:rustc-env=FLASH_ATTN_INCLUDEDIR={include}");
}

fn pkg_config(question: &str) -> String {
    let program = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".to_string());
    match Command::new(&program).args([question, "flash_attn"]).output() {
        Ok(answer) if answer.status.success() => String::from_utf8_lossy(&answer.stdout).trim().to_string(),
        Ok(answer) => fail(&String::from_utf8_lossy(&answer.stderr)),
        Err(error) => {
            fail(&format!("`{program}` does not run ({error}); install pkg-config, or name it in PKG_CONFIG"))
        }
    }
}

/// An end without the backtrace of a panic, which would hide the advice.
fn fail(reason: &str) -> ! {
    eprintln!("{ADVICE}\n\n{}", reason.trim());
    exit(1)
}

fn absolute(folder: &str) -> String {
    fs::canonicalize(folder).map_or_else(|_| folder.to_string(), |path| path.display().to_string())
}

/// As a shell splits them: pkg-config puts a backslash before a space in a name.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => words.last_mut().unwrap().extend(letters.next()),
            ' ' => words.push(String::new()),
            _ => words.last_mut().unwrap().push(letter),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}
