//! Canonical JSON: one spelling for equal values.

use serde_json::{Map, Number, Value};

/// Form of canonical JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// JSON Canonicalization Scheme (RFC 8785).
    Jcs,
    /// Every object is a list of objects with one member each, sorted by name (OCM specification, `jsonNormalisation/v1`).
    Entries,
}

impl Form {
    /// Serialises a value without white space.
    pub(super) fn serialize(self, value: &Value) -> String {
        let mut text = String::new();
        self.write(value, &mut text);
        match self {
            Self::Jcs => text,
            // Go also escapes the characters with a meaning in HTML and JavaScript, which only strings contain.
            Self::Entries => text
                .replace('<', "\\u003c")
                .replace('>', "\\u003e")
                .replace('&', "\\u0026")
                .replace('\u{2028}', "\\u2028")
                .replace('\u{2029}', "\\u2029"),
        }
    }

    fn write(self, value: &Value, out: &mut String) {
        match value {
            Value::Number(value) => out.push_str(&number(value)),
            // As serde_json writes them: with the shortest escapes, and only where JSON demands one.
            Value::Null | Value::Bool(_) | Value::String(_) => out.push_str(&value.to_string()),
            Value::Array(values) => {
                out.push('[');
                for (index, value) in values.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    self.write(value, out);
                }
                out.push(']');
            }
            Value::Object(members) => self.object(members, out),
        }
    }

    fn object(self, members: &Map<String, Value>, out: &mut String) {
        let mut members: Vec<_> = members.iter().collect();
        members.sort_by(|(one, _), (other, _)| match self {
            Self::Jcs => one.encode_utf16().cmp(other.encode_utf16()),
            Self::Entries => one.cmp(other),
        });
        let (open, separator, close) = match self {
            Self::Jcs => ("{", ",", "}"),
            Self::Entries if members.is_empty() => ("[", "", "]"),
            Self::Entries => ("[{", "},{", "}]"),
        };
        out.push_str(open);
        for (index, (name, value)) in members.into_iter().enumerate() {
            if index > 0 {
                out.push_str(separator);
            }
            out.push_str(&Value::from(name.as_str()).to_string());
            out.push(':');
            self.write(value, out);
        }
        out.push_str(close);
    }
}

/// A number as ECMAScript spells it: as a double-precision one (ECMA-262, *Number::toString*).
fn number(value: &Number) -> String {
    // Every JSON number has a value as f64.
    let value = value.as_f64().unwrap_or_default();
    if value == 0.0 {
        return "0".to_owned();
    }
    // The shortest digits that have this value, as `d.ddde±x`; of two with equal distance, the even ones.
    let shortest = format!("{:e}", value.abs());
    let places = shortest.split_once('e').map_or(0, |(mantissa, _)| mantissa.len().saturating_sub(2));
    let rounded = format!("{:.places$e}", value.abs());
    let scientific = if rounded.parse() == Ok(value.abs()) { rounded } else { shortest };
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let digits = mantissa.replace('.', "");
    let exponent: i32 = exponent.parse().unwrap_or_default();
    let sign = if value < 0.0 { "-" } else { "" };
    let zeros = |count: i32| "0".repeat(usize::try_from(count).unwrap_or_default());
    let count = i32::try_from(digits.len()).unwrap_or_default();
    // Number of digits before the decimal point.
    let whole = exponent + 1;
    match whole {
        22.. | ..=-6 => {
            let (first, rest) = digits.split_at(1);
            let point = if rest.is_empty() { "" } else { "." };
            let plus = if exponent > 0 { "+" } else { "" };
            format!("{sign}{first}{point}{rest}e{plus}{exponent}")
        }
        ..=0 => format!("{sign}0.{}{digits}", zeros(-whole)),
        _ if whole >= count => format!("{sign}{digits}{}", zeros(whole - count)),
        _ => {
            let (before, after) = digits.split_at(usize::try_from(whole).unwrap_or_default());
            format!("{sign}{before}.{after}")
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_those_of_ecmascript() {
        // RFC 8785, appendix B, and the limits of the two notations.
        for (value, text) in [
            (json!(0), "0"),
            (json!(-0.0), "0"),
            (json!(5e-324), "5e-324"),
            (json!(-1.7976931348623157e308), "-1.7976931348623157e+308"),
            (json!(9007199254740992_i64), "9007199254740992"),
            (json!(295147905179352830000_f64), "295147905179352830000"),
            (json!(9.999999999999997e22), "9.999999999999997e+22"),
            (json!(1e23), "1e+23"),
            (json!(1e21), "1e+21"),
            (json!(999999999999999700000_f64), "999999999999999700000"),
            (json!(333333333.3333332), "333333333.3333332"),
            (json!(0.000001), "0.000001"),
            (json!(0.0000001), "1e-7"),
            (json!(-0.0000033333333333333333), "-0.0000033333333333333333"),
            (json!(f64::from_bits(0x4314_3ff3_c1cb_0959)), "1424953923781206.2"),
            (json!(u64::MAX), "18446744073709552000"),
            (json!(-12), "-12"),
            (json!(1.5), "1.5"),
            (json!(100), "100"),
        ] {
            assert_eq!(Form::Jcs.serialize(&value), text);
        }
    }

    #[test]
    fn members_are_sorted_by_utf16_units() {
        // RFC 8785, section 3.2.3.
        let value = json!({"\u{20ac}": 1, "\r": 2, "\u{fb33}": 3, "1": 4, "\u{1f600}": 5, "\u{80}": 6, "\u{f6}": 7});
        let text = Form::Jcs.serialize(&value);
        let values: String = text.split(':').skip(1).filter_map(|rest| rest.chars().next()).collect();
        assert_eq!(values, "2467153");
        let astral_last = Form::Entries.serialize(&value);
        assert!(astral_last.ends_with(":5}]"), "by characters: {astral_last}");
    }

    #[test]
    fn strings_are_escaped_as_little_as_possible() {
        // RFC 8785, section 3.2.2.2.
        let value = json!("\u{20ac}$\u{f}\nA'B\"\\\\\"/\u{7f}<");
        assert_eq!(Form::Jcs.serialize(&value), "\"\u{20ac}$\\u000f\\nA'B\\\"\\\\\\\\\\\"/\u{7f}<\"");
        assert_eq!(Form::Entries.serialize(&json!("<a&b>\u{2028}")), r#""\u003ca\u0026b\u003e\u2028""#);
    }

    #[test]
    fn entries_are_objects_with_one_member() {
        let value = json!({"b": {"y": null, "x": [true, {}]}, "a": [{"c": 1}]});
        assert_eq!(Form::Entries.serialize(&value), r#"[{"a":[[{"c":1}]]},{"b":[{"x":[true,[]]},{"y":null}]}]"#);
        assert_eq!(Form::Jcs.serialize(&value), r#"{"a":[{"c":1}],"b":{"x":[true,{}],"y":null}}"#);
    }
}
