//! src/ffi.rs against the installed header: the same declarations in the same order, types in Rust's spelling; and,
//! since that leaves out what the compilers make of them, the same sizes, offsets and values, each from a program that
//! is generated from its own side's declarations.

mod declarations;

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use declarations::{of_c, of_rust, Item};

const FFI: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ffi.rs");
const HEADER: &str = concat!(env!("FLASH_ATTN_INCLUDEDIR"), "/flash_attn/flash_attn.h");

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn declarations_are_those_of_the_header() {
    let (header, ffi) = (of_c(&read(HEADER)), of_rust(&read(FFI)));
    assert!(!header.is_empty() && !ffi.is_empty());
    for (theirs, ours) in header.iter().zip(&ffi) {
        assert_eq!(theirs, ours, "left: {HEADER}; right: {FFI}");
    }
    let common = header.len().min(ffi.len());
    assert_eq!(header[common..], ffi[common..], "left: only in {HEADER}; right: only in {FFI}");
}

#[test]
fn layout_is_that_of_the_header() {
    let c = folder().join("layout.c");
    fs::write(&c, c_program(&of_c(&read(HEADER)))).unwrap();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_string());
    let mut words = compiler.split_whitespace(); // CC may have options, or a cache in front
    let mut compile_c = Command::new(words.next().expect("CC is empty"));
    compile_c.args(words).arg("-std=c11").arg("-I").arg(env!("FLASH_ATTN_INCLUDEDIR"));

    let rust = folder().join("layout.rs");
    fs::write(&rust, rust_program(&of_rust(&read(FFI)))).unwrap();
    let mut compile_rust = Command::new(env::var("RUSTC").unwrap_or_else(|_| "rustc".to_string()));
    compile_rust.args(["--edition=2021", "--allow=warnings"]);

    let (theirs, ours) = (output_of(compile_c, &c, "layout_c"), output_of(compile_rust, &rust, "layout_rust"));
    assert!(theirs.lines().count() > 80, "{theirs}");
    for (theirs, ours) in theirs.lines().zip(ours.lines()) {
        assert_eq!(theirs, ours, "left: {HEADER}; right: {FFI}");
    }
    assert_eq!(theirs, ours);
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

fn output_of(mut compile: Command, source: &Path, program: &str) -> String {
    let program = folder().join(program);
    let status = compile.arg(source).arg("-o").arg(&program).status();
    assert!(status.as_ref().map_or(false, |status| status.success()), "{compile:?}: {status:?}");
    let done = Command::new(&program).output().unwrap();
    assert!(done.status.success(), "{program:?}: {}", done.status);
    String::from_utf8(done.stdout).unwrap()
}

fn c_program(items: &[Item]) -> String {
    let mut text = String::from("#include <flash_attn/flash_attn.h>\n#include <stdio.h>\n\nint main(void) {\n");
    let mut print = |what: &str, value: &str| writeln!(text, "  printf(\"{what} %d\\n\", (int){value});").unwrap();
    for item in items {
        match item {
            Item::Enum { name, constants } => {
                print(&format!("size of {name}"), &format!("sizeof({name})"));
                constants.iter().for_each(|(constant, _)| print(constant, constant));
            }
            Item::Struct { name, fields } => {
                print(&format!("size of {name}"), &format!("sizeof({name})"));
                print(&format!("alignment of {name}"), &format!("_Alignof({name})"));
                for (field, _) in fields {
                    print(&format!("offset of {name}.{field}"), &format!("offsetof({name}, {field})"));
                    print(&format!("size of {name}.{field}"), &format!("sizeof((({name}*)0)->{field})"));
                }
            }
            Item::Function { .. } => {}
        }
    }
    text + "  return 0;\n}\n"
}

fn rust_program(items: &[Item]) -> String {
    let mut text = format!(
        "#[path = {FFI:?}]\nmod ffi;\nuse ffi::*;\nuse std::mem::{{align_of, size_of, size_of_val, MaybeUninit}};\n\
         use std::ptr::addr_of;\n\nfn main() {{\n"
    );
    let mut print = |what: &str, value: &str| writeln!(text, "    println!(\"{what} {{}}\", {value});").unwrap();
    for item in items {
        match item {
            Item::Enum { name, constants } => {
                print(&format!("size of {name}"), &format!("size_of::<{name}>()"));
                constants.iter().for_each(|(constant, _)| print(constant, constant));
            }
            Item::Struct { name, fields } => {
                print(&format!("size of {name}"), &format!("size_of::<{name}>()"));
                print(&format!("alignment of {name}"), &format!("align_of::<{name}>()"));
                for (field, _) in fields {
                    // All zero bytes are a value of each.
                    let zero = format!("let s = unsafe {{ MaybeUninit::<{name}>::zeroed().assume_init() }}");
                    let offset = format!("addr_of!(s.{field}) as usize - addr_of!(s) as usize");
                    print(&format!("offset of {name}.{field}"), &format!("{{ {zero}; {offset} }}"));
                    print(&format!("size of {name}.{field}"), &format!("{{ {zero}; size_of_val(&s.{field}) }}"));
                }
            }
            Item::Function { .. } => {}
        }
    }
    text + "}\n"
}
