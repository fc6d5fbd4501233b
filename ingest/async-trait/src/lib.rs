//! `#[async_trait]`: async methods of traits that are used as trait objects.
//!
//! The macro turns `async fn f(&self, x: &X) -> R` into
//!
//! ```text
//! fn f<'async_trait>(&'async_trait self, x: &'async_trait X)
//!     -> Pin<Box<dyn Future<Output = R> + Send + 'async_trait>>
//! { Box::pin(async move { … }) }
//! ```
//!
//! The crate that it replaces gives every reference a lifetime of its own and adds the clause
//! `where 'life0: 'async_trait, 'life1: 'async_trait`. rustc keeps the proof that a future is `Send` in its global cache
//! only where no such clause is in scope. With the clauses it proves for every method of every implementation that all of
//! DataFusion's `Expr` and `LogicalPlan` are `Send` and `Sync`: two thirds of the time in which `datafusion` compiles, and
//! nine tenths of `datafusion-catalog`'s (apache/datafusion#13814).
//!
//! One lifetime is as general as several where a type is covariant in them: a caller's longer references shorten to the
//! shortest. A lifetime behind `&mut`, or in the arguments of a type other than `Option`, keeps its own name and clause,
//! and so do all lifetimes of a method whose return type elides one.

#![forbid(unsafe_code)]

use proc_macro::TokenStream;
use proc_macro2::{Span, TokenStream as Tokens, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::punctuated::Punctuated;
use syn::visit_mut::{self, VisitMut};
use syn::{
    Block, Error, FnArg, GenericArgument, GenericParam, Generics, ImplItem, Item, Lifetime, Pat,
    PathArguments, ReceiverKind, ReturnType, Signature, Token, TraitItem, Type, TypeParamBound,
    TypeReference, WhereClause, parse_quote,
};

/// Makes the async methods of a trait, or of an implementation of one, return boxed futures, which are `Send` unless the
/// argument is `?Send`.
#[proc_macro_attribute]
pub fn async_trait(arguments: TokenStream, item: TokenStream) -> TokenStream {
    expand(arguments.into(), item.into()).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(arguments: Tokens, item: Tokens) -> syn::Result<Tokens> {
    let send = match arguments.to_string().replace(' ', "").as_str() {
        "" => true,
        "?Send" => false,
        _ => return Err(Error::new_spanned(arguments, "the only argument of async_trait is `?Send`")),
    };
    match syn::parse2(item)? {
        Item::Trait(mut item) => {
            for member in &mut item.items {
                if let TraitItem::Fn(method) = member
                    && method.sig.asyncness.is_some()
                {
                    let outer =
                        Outer { generics: &item.generics, supertraits: Some(&item.supertraits), send };
                    outer.desugar(&mut method.sig, method.default.as_mut());
                    method.attrs.push(allowed());
                }
            }
            Ok(item.into_token_stream())
        }
        Item::Impl(mut item) => {
            for member in &mut item.items {
                if let ImplItem::Fn(method) = member
                    && method.sig.asyncness.is_some()
                {
                    let outer = Outer { generics: &item.generics, supertraits: None, send };
                    outer.desugar(&mut method.sig, Some(&mut method.block));
                    method.attrs.push(allowed());
                }
            }
            Ok(item.into_token_stream())
        }
        item => Err(Error::new_spanned(item, "async_trait is for traits and for implementations of traits")),
    }
}

/// Lints that would find something in code that the macro adds.
fn allowed() -> syn::Attribute {
    parse_quote! {
        #[allow(
            mismatched_lifetime_syntaxes,
            clippy::async_yields_async,
            clippy::diverging_sub_expression,
            clippy::let_unit_value,
            clippy::needless_return,
            clippy::type_complexity,
            clippy::unnecessary_literal_unwrap,
            clippy::used_underscore_binding,
        )]
    }
}

fn async_trait_lifetime() -> Lifetime {
    Lifetime::new("'async_trait", Span::call_site())
}

fn predicates(clause: &mut Option<WhereClause>) -> &mut Punctuated<syn::WherePredicate, Token![,]> {
    &mut clause
        .get_or_insert_with(|| WhereClause {
            where_token: Token![where](Span::call_site()),
            predicates: Punctuated::new(),
        })
        .predicates
}

/// What surrounds a method: a trait, or an implementation of one.
struct Outer<'a> {
    generics: &'a Generics,
    /// `None` in an implementation.
    supertraits: Option<&'a Punctuated<TypeParamBound, Token![+]>>,
    send: bool,
}

impl Outer<'_> {
    fn desugar(&self, signature: &mut Signature, mut body: Option<&mut Block>) {
        let mentions_self = mentions_self(signature.to_token_stream())
            || body.as_ref().is_some_and(|body| mentions_self(body.to_token_stream()));
        let output = match &signature.output {
            ReturnType::Default => quote!(()),
            ReturnType::Type(_, output) => output.to_token_stream(),
        };
        if let Some(body) = &mut body {
            box_body(signature, body, &output);
        }
        signature.asyncness = None;
        self.name_lifetimes(signature);
        self.bound_self(signature, body.is_some(), mentions_self);
        let send = self.send.then(|| quote!(::core::marker::Send+));
        signature.output = parse_quote! {
            -> ::core::pin::Pin<::std::boxed::Box<dyn ::core::future::Future<Output = #output> + #send 'async_trait>>
        };
    }

    /// Names the lifetimes that the arguments elide, and lets all type parameters and named lifetimes outlive the future.
    fn name_lifetimes(&self, signature: &mut Signature) {
        let mut names =
            Names { separate: elides_lifetime(&signature.output), own: Vec::new(), used: Vec::new() };
        for input in &mut signature.inputs {
            match input {
                FnArg::Receiver(receiver) => match &mut receiver.kind {
                    ReceiverKind::Reference(_, lifetime, _) => {
                        let name = names.name(lifetime.take());
                        *lifetime = Some(name);
                    }
                    ReceiverKind::Typed(_, ty) => names.visit_type_mut(ty),
                    _ => {}
                },
                FnArg::Typed(argument) => {
                    names.visit_type_mut(&mut argument.ty);
                    bound_impl_traits(&mut argument.ty);
                }
            }
        }
        let generics = &mut signature.generics;
        for parameter in &mut generics.params {
            match parameter {
                GenericParam::Type(parameter) => parameter.bounds.push(parse_quote!('async_trait)),
                GenericParam::Lifetime(parameter) => parameter.bounds.push(async_trait_lifetime()),
                GenericParam::Const(_) => {}
            }
        }
        for parameter in self.generics.lifetimes() {
            let name = &parameter.lifetime;
            if names.used.contains(name) {
                predicates(&mut generics.where_clause).push(parse_quote!(#name: 'async_trait));
            }
        }
        // Lifetimes come before types.
        for name in &names.own {
            generics.params.insert(0, parse_quote!(#name));
            predicates(&mut generics.where_clause).push(parse_quote!(#name: 'async_trait));
        }
        generics.params.insert(0, parse_quote!('async_trait));
    }

    /// Lets `Self` outlive the future where no reference to it implies that, and lets a default body hold `self`.
    fn bound_self(&self, signature: &mut Signature, has_body: bool, mentions_self: bool) {
        let receiver = signature.receiver();
        let (by_reference, needed): (bool, &[&str]) = match receiver.map(|receiver| &receiver.kind) {
            Some(ReceiverKind::Reference(_, _, None)) => (true, &["Sync"]),
            Some(ReceiverKind::Reference(..)) => (true, &["Send"]),
            Some(ReceiverKind::Typed(_, ty)) => match ty.as_ref() {
                Type::Reference(ty) => (true, if ty.mutability.is_some() { &["Send"] } else { &["Sync"] }),
                _ => (false, &["Send", "Sync"]),
            },
            _ => (false, &["Send"]),
        };
        // A reference that keeps its own lifetime implies no more than that.
        let implied = by_reference && !elides_lifetime(&signature.output);
        let outlives = (mentions_self && !implied).then(|| quote!('async_trait+));
        let bounds = match self.supertraits {
            Some(supertraits) if has_body && self.send && mentions_self => {
                let has = |name: &str| {
                    supertraits.iter().any(|bound| bound.to_token_stream().to_string().ends_with(name))
                };
                needed.iter().filter(|name| !has(name)).map(|name| format_ident!("{name}")).collect()
            }
            _ => Vec::new(),
        };
        if outlives.is_some() || !bounds.is_empty() {
            let bounds = quote!(#outlives #(::core::marker::#bounds +)*);
            predicates(&mut signature.generics.where_clause).push(parse_quote!(Self: #bounds));
        }
    }
}

/// Puts the body into a boxed future that owns the arguments.
fn box_body(signature: &mut Signature, body: &mut Block, output: &Tokens) {
    let mut bindings = Tokens::new();
    for (place, input) in signature.inputs.iter_mut().enumerate() {
        match input {
            FnArg::Receiver(receiver) => {
                let by_value = !matches!(receiver.kind, ReceiverKind::Reference(..));
                // The future owns `self`, also where the body does not name it.
                if by_value && receiver.mutability.is_none() {
                    bindings.extend(quote!(let _ = &self;));
                }
            }
            FnArg::Typed(argument) if matches!(*argument.ty, Type::Reference(_)) => {}
            FnArg::Typed(argument) => {
                let attributes = argument.attrs.iter().filter(|attribute| attribute.path().is_ident("cfg"));
                let pattern = argument.pat.clone();
                let name = match &mut *argument.pat {
                    Pat::Ident(pattern) if pattern.subpat.is_none() => {
                        pattern.by_ref = None;
                        pattern.mutability = None;
                        pattern.ident.clone()
                    }
                    pattern => {
                        let name = format_ident!("__argument{place}", span = Span::mixed_site());
                        *pattern = parse_quote!(#name);
                        name
                    }
                };
                let bound = if let Pat::Wild(_) = *pattern {
                    name.to_token_stream()
                } else {
                    pattern.to_token_stream()
                };
                bindings.extend(quote!(#(#attributes)* let #bound = #name;));
            }
        }
    }
    let result = format_ident!("__result", span = Span::mixed_site());
    // The type of an async block is that of its first `return`.
    let typed = (!output.to_string().contains("impl ")).then(|| {
        quote! {
            if false {
                return ::core::option::Option::<#output>::None.unwrap();
            }
        }
    });
    let annotation = typed.is_some().then(|| quote!(: #output));
    let statements = quote! {
        ::std::boxed::Box::pin(async move {
            #typed
            #bindings
            let #result #annotation = #body;
            #[allow(unreachable_code)]
            #result
        })
    };
    *body = parse_quote!({ #statements });
}

/// Names lifetimes that the types of arguments elide.
struct Names {
    /// Whether what is visited needs lifetimes of its own.
    separate: bool,
    own: Vec<Lifetime>,
    /// Lifetimes that the user named.
    used: Vec<Lifetime>,
}

impl Names {
    fn name(&mut self, lifetime: Option<Lifetime>) -> Lifetime {
        match lifetime {
            Some(lifetime) if lifetime.ident != "_" => {
                self.used.push(lifetime.clone());
                lifetime
            }
            _ if self.separate => {
                let name = Lifetime::new(&format!("'life{}", self.own.len()), Span::call_site());
                self.own.push(name.clone());
                name
            }
            _ => async_trait_lifetime(),
        }
    }

    fn separately(&mut self, separate: bool, visit: impl FnOnce(&mut Self)) {
        let before = self.separate;
        self.separate |= separate;
        visit(self);
        self.separate = before;
    }
}

impl VisitMut for Names {
    fn visit_type_reference_mut(&mut self, reference: &mut TypeReference) {
        let name = self.name(reference.lifetime.take());
        reference.lifetime = Some(name);
        self.separately(reference.mutability.is_some(), |names| names.visit_type_mut(&mut reference.elem));
    }

    fn visit_path_segment_mut(&mut self, segment: &mut syn::PathSegment) {
        let covariant = segment.ident == "Option";
        if let PathArguments::AngleBracketed(arguments) = &mut segment.arguments {
            self.separately(!covariant, |names| {
                for argument in &mut arguments.args {
                    names.visit_generic_argument_mut(argument);
                }
            });
        }
    }

    fn visit_generic_argument_mut(&mut self, argument: &mut GenericArgument) {
        match argument {
            GenericArgument::Lifetime(lifetime) => *lifetime = self.name(Some(lifetime.clone())),
            argument => visit_mut::visit_generic_argument_mut(self, argument),
        }
    }

    fn visit_type_trait_object_mut(&mut self, object: &mut syn::TypeTraitObject) {
        self.separately(true, |names| visit_mut::visit_type_trait_object_mut(names, object));
    }

    fn visit_type_impl_trait_mut(&mut self, ty: &mut syn::TypeImplTrait) {
        self.separately(true, |names| visit_mut::visit_type_impl_trait_mut(names, ty));
    }

    fn visit_lifetime_mut(&mut self, lifetime: &mut Lifetime) {
        *lifetime = self.name(Some(lifetime.clone()));
    }

    // Lifetimes that a function's type elides are its own.
    fn visit_type_fn_ptr_mut(&mut self, _: &mut syn::TypeFnPtr) {}
}

/// Lets the types that `impl Trait` denotes outlive the future.
fn bound_impl_traits(ty: &mut Type) {
    match ty {
        Type::ImplTrait(ty) => ty.bounds.push(parse_quote!('async_trait)),
        Type::Reference(reference) => {
            bound_impl_traits(&mut reference.elem);
            if let Type::ImplTrait(ty) = &*reference.elem {
                *reference.elem = parse_quote!((#ty));
            }
        }
        _ => {}
    }
}

/// Whether the return type has a lifetime without a name.
fn elides_lifetime(output: &ReturnType) -> bool {
    struct Elided(bool);
    impl VisitMut for Elided {
        fn visit_type_reference_mut(&mut self, reference: &mut TypeReference) {
            self.0 |= reference.lifetime.is_none();
            visit_mut::visit_type_reference_mut(self, reference);
        }

        fn visit_lifetime_mut(&mut self, lifetime: &mut Lifetime) {
            self.0 |= lifetime.ident == "_";
        }

        fn visit_type_fn_ptr_mut(&mut self, _: &mut syn::TypeFnPtr) {}
    }
    let mut elided = Elided(false);
    elided.visit_return_type_mut(&mut output.clone());
    elided.0
}

fn mentions_self(tokens: Tokens) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(name) => name == "Self" || name == "self",
        TokenTree::Group(group) => mentions_self(group.stream()),
        _ => false,
    })
}
