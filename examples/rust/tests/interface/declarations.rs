//! The declarations of flash_attn.h and of ffi.rs as values that can be compared, by two small parsers. Each takes what
//! its file has, and panics at anything else, so that nothing of it is passed over.

/// Types are in Rust's spelling, without spaces that mean nothing.
#[derive(Debug, PartialEq, Eq)]
pub enum Item {
    Enum { name: String, constants: Vec<(String, i64)> },
    Struct { name: String, fields: Vec<(String, String)> },
    Function { name: String, parameters: Vec<(String, String)>, result: String },
}

pub fn of_c(header: &str) -> Vec<Item> {
    let mut text = without_comments(header, "/*", "*/");
    for directive in text.lines().filter(|line| line.starts_with("#define")) {
        assert_eq!(directive, "#define FLASH_ATTN_H", "a macro, which ffi.rs cannot have");
    }
    text = text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join(" ");
    let text = text.replacen("extern \"C\" {", "", 1).replace("FLASH_ATTN_API", "");

    let statements = split(&text, ';');
    let (end, statements) = statements.split_last().expect("an empty header");
    assert_eq!(end, "}", "what follows the last declaration");
    statements.iter().map(|statement| c_item(statement)).collect()
}

fn c_item(statement: &str) -> Item {
    if let Some(rest) = statement.strip_prefix("typedef enum {") {
        let (body, name) = rest.rsplit_once('}').unwrap();
        let constants = split(body, ',').iter().map(|constant| constant_of(constant)).collect();
        Item::Enum { name: name.trim().to_string(), constants }
    } else if let Some(rest) = statement.strip_prefix("typedef struct {") {
        let (body, name) = rest.rsplit_once('}').unwrap();
        let fields = split(body, ';').iter().flat_map(|field| c_fields(field)).collect();
        Item::Struct { name: name.trim().to_string(), fields }
    } else {
        let (head, parameters) = statement.split_once('(').unwrap_or_else(|| panic!("not understood: {statement}"));
        let (name, result) = c_variable(head);
        let result = if result == "c_void" { String::new() } else { result };
        Item::Function { name, parameters: c_parameters(parameters.strip_suffix(')').unwrap()), result }
    }
}

/// "double a, b": two fields. Declarators after the first are plain names.
fn c_fields(text: &str) -> Vec<(String, String)> {
    let declarators = split(text, ',');
    let (name, of_all) = c_variable(&declarators[0]);
    let others = declarators[1..].iter().map(|name| {
        assert!(is_name(name) && !declarators[0].contains(&['*', '[', '('][..]), "not understood: {text}");
        (name.clone(), of_all.clone())
    });
    std::iter::once((name, of_all.clone())).chain(others).collect()
}

fn c_parameters(text: &str) -> Vec<(String, String)> {
    if text.trim() == "void" {
        return Vec::new();
    }
    split(text, ',').iter().map(|parameter| c_variable(parameter)).collect()
}

/// "const T* name", "T name[4]" or "R (*name)(T x, U y)": the name and its type.
fn c_variable(text: &str) -> (String, String) {
    if let Some((result, rest)) = text.split_once("(*") {
        let (name, parameters) = rest.split_once(')').unwrap();
        let parameters = parameters.trim().strip_prefix('(').and_then(|text| text.strip_suffix(')')).unwrap();
        let list: Vec<String> = c_parameters(parameters).iter().map(|(name, of)| format!("{name}: {of}")).collect();
        assert_eq!(result.trim(), "void", "not understood: {text}");
        return (name.to_string(), compact(&format!("Option<unsafe extern \"C\" fn({})>", list.join(", "))));
    }
    let (text, length) = match text.split_once('[') {
        Some((text, length)) => (text, length.strip_suffix(']')),
        None => (text, None),
    };
    let at = text.rfind(&['*', ' '][..]).unwrap_or_else(|| panic!("not understood: {text}")) + 1;
    let (of, name) = (c_type(text[..at].trim()), text[at..].to_string());
    assert!(is_name(&name), "not understood: {text}");
    (name, compact(&length.map_or_else(|| of.clone(), |length| format!("[{of}; {length}]"))))
}

fn c_type(text: &str) -> String {
    if let Some(pointee) = text.strip_suffix('*') {
        return match pointee.strip_prefix("const ") {
            Some(constant) => format!("*const {}", c_type(constant)),
            None => format!("*mut {}", c_type(pointee)),
        };
    }
    assert!(is_name(text), "not understood: {text}");
    match text {
        "int32_t" => "i32",
        "int64_t" => "i64",
        "size_t" => "usize",
        "double" => "f64",
        "void" => "c_void",
        "char" => "c_char",
        "int" => "c_int",
        ours if ours.starts_with("flash_attn_") => ours,
        other => panic!("a type that this test does not know: {other}"),
    }
    .to_string()
}

pub fn of_rust(source: &str) -> Vec<Item> {
    let text = without_comments(source, "//", "\n");
    let text = text.lines().filter(|line| !line.starts_with("#![") && !line.starts_with("use ")).collect::<Vec<_>>();
    let mut items = Vec::new();
    for statement in rust_statements(&compact(&text.join(" "))) {
        if let Some(rest) = statement.strip_prefix("pub type ") {
            let (name, of) = rest.split_once(" = ").unwrap();
            assert_eq!(of, "c_uint", "what C's enum {name} is");
            items.push(Item::Enum { name: name.to_string(), constants: Vec::new() });
        } else if let Some(rest) = statement.strip_prefix("pub const ") {
            let (typed, value) = rest.split_once(" = ").unwrap();
            let (constant, of) = typed.split_once(": ").unwrap();
            match items.last_mut() {
                Some(Item::Enum { name, constants }) if name == of => {
                    constants.push((constant.to_string(), value.parse().unwrap()));
                }
                other => panic!("{constant} follows {other:?}, which is not its enum"),
            }
        } else if let Some(rest) = statement.strip_prefix("pub fn ") {
            let (name, rest) = rest.split_once('(').unwrap();
            let (parameters, result) = rest.rsplit_once(')').unwrap();
            let result = result.trim().strip_prefix("-> ").unwrap_or("").to_string();
            items.push(Item::Function { name: name.to_string(), parameters: rust_fields(parameters), result });
        } else {
            let rest = statement.strip_prefix("#[repr(C)] ").unwrap_or_else(|| panic!("not #[repr(C)]: {statement}"));
            let at = rest.find("pub struct ").unwrap_or_else(|| panic!("not understood: {statement}"));
            let (name, body) = rest[at..]["pub struct ".len()..].split_once(" {").unwrap();
            items.push(Item::Struct { name: name.to_string(), fields: rust_fields(body.strip_suffix('}').unwrap()) });
        }
    }
    items
}

/// Up to a semicolon or the closing brace of a struct; those within the braces of `extern "C"` by themselves.
fn rust_statements(text: &str) -> Vec<String> {
    let (head, functions) = text.split_once("extern \"C\" {").expect("no extern \"C\" block");
    let functions = functions.trim().strip_suffix('}').expect("the extern \"C\" block is not the last");
    let mut statements = Vec::new();
    let mut rest = head.trim();
    while !rest.is_empty() {
        // The first of both: a struct has no semicolon before its first brace.
        let semicolon = rest.find(';').unwrap_or(rest.len());
        let brace = rest.find('{').unwrap_or(rest.len());
        let end = if semicolon < brace { semicolon } else { rest.find('}').expect("a brace is not closed") + 1 };
        statements.push(rest[..end].trim().to_string());
        rest = rest[end..].trim_start_matches(';').trim();
    }
    statements.extend(split(functions, ';'));
    statements
}

/// "pub a: T, pub b: U" or "a: T, b: U".
fn rust_fields(text: &str) -> Vec<(String, String)> {
    let pairs = split(text, ',');
    let pairs = pairs.iter().map(|pair| pair.strip_prefix("pub ").unwrap_or(pair).split_once(": ").unwrap());
    pairs.map(|(name, of)| (name.to_string(), compact(of))).collect()
}

/// "NAME = 3"
fn constant_of(text: &str) -> (String, i64) {
    let (name, value) = text.split_once('=').unwrap_or_else(|| panic!("an enum's constant without its value: {text}"));
    (name.trim().to_string(), value.trim().parse().unwrap())
}

fn without_comments(text: &str, begin: &str, end: &str) -> String {
    let mut parts = text.split(begin);
    let code = parts.next().unwrap_or("").to_string();
    parts.fold(code, |code, part| code + "\n" + part.split_once(end).map_or("", |(_, rest)| rest))
}

/// At separators outside of brackets; empty parts are left out, and every part is compact.
fn split(text: &str, separator: char) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for letter in text.chars() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if letter == separator && depth <= 0 {
            parts.push(String::new());
        } else {
            parts.last_mut().unwrap().push(letter);
        }
    }
    parts.iter().map(|part| compact(part)).filter(|part| !part.is_empty()).collect()
}

/// One space between words, none inside of brackets' ends, no comma before a closing bracket.
fn compact(text: &str) -> String {
    let mut text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for (spaced, plain) in [("( ", "("), (" )", ")"), (",)", ")"), (", >", ">"), (",>", ">"), ("< ", "<"), (" >", ">")]
    {
        text = text.replace(spaced, plain);
    }
    text
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}
