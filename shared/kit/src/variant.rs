//! Names of enum variants, derived with `strum::IntoStaticStr`.

/// Name of a variant as a static string: the value of a metric label, a JSON field or a table cell.
///
/// Every type with `#[derive(strum::IntoStaticStr)]` implements it. The derived `From` alone would need the target type
/// at each use.
pub trait VariantName {
    /// Name of the variant, without its fields.
    #[must_use]
    fn as_str(&self) -> &'static str;
}

impl<T> VariantName for T
where
    for<'a> &'a T: Into<&'static str>,
{
    fn as_str(&self) -> &'static str {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoStaticStr;

    use super::*;

    #[derive(IntoStaticStr)]
    #[strum(serialize_all = "kebab-case")]
    enum Fault {
        TooLarge(#[expect(dead_code, reason = "the name leaves fields out")] String),
        #[strum(serialize = "other")]
        Unknown,
    }

    #[test]
    fn name_is_the_variants_without_its_fields() {
        assert_eq!([Fault::TooLarge("a".into()), Fault::Unknown].map(|fault| fault.as_str()), ["too-large", "other"]);
    }
}
