"""The page's style sheet: a report to be read, in light, in dark and on paper.

A module and not a data file, so that an installed package needs no further files.
"""

CSS = """
:root {
  --ink: #1b1c1e; --faint: #8b8f94; --paper: #ffffff; --rule: #c9ccd0; --soft: #f4f5f6; --link: #0b5c8e;
  --alarm: #a51c1c; --alarm-paper: #fdf0ef;
  --text: Charter, "Bitstream Charter", "Source Serif 4", "Iowan Old Style", Georgia, "Liberation Serif", serif;
  --figures: "Source Sans 3", "Helvetica Neue", Arial, "Liberation Sans", sans-serif;
  color-scheme: light dark;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e5e7; --faint: #8f949a; --paper: #16181b; --rule: #3b4046; --soft: #1f2226; --link: #7cc0ee;
    --alarm: #ff8f86; --alarm-paper: #351413;
  }
}
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%; }
body { margin: 0; font: 17px/1.5 var(--text); }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; font-weight: 600; margin: 0 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; font-weight: 600; margin: 2.6rem 0 .7rem; }
p, ul { max-width: 44rem; margin: .6rem 0; }
.summary { font-size: 1.06rem; }
.note, caption, figcaption { color: var(--ink); opacity: .78; font-size: .86rem; line-height: 1.4; }
.banner { max-width: none; border: 2px solid var(--alarm); background: var(--alarm-paper); color: var(--alarm);
  padding: .8rem 1rem; font-size: 1.06rem; }
.warnings h2 { margin: 1.2rem 0 .2rem; font-size: 1rem; }
.warnings ul { margin-top: .2rem; padding-left: 1.2rem; }
.wide { overflow-x: auto; margin: .8rem 0 1.4rem; }
table { border-collapse: collapse; font: .88rem/1.35 var(--figures); font-variant-numeric: tabular-nums lining-nums;
  border-top: 1.5px solid var(--ink); border-bottom: 1.5px solid var(--ink); }
caption { caption-side: bottom; text-align: left; padding-top: .45rem; font-family: var(--text); }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; font-weight: 400; }
th + th, td + td, th + td, td + th { padding-left: .9rem; }
tr > :last-child { padding-right: .2rem; }
thead th { font-weight: 600; vertical-align: bottom; border-bottom: .75px solid var(--ink); }
thead th.over { text-align: center; border-bottom: .75px solid var(--rule); }
th.n, td.n { text-align: right; white-space: nowrap; padding-left: .9rem; }
thead th.n { white-space: normal; min-width: 4.5rem; }
tbody tr > th[scope="row"] { min-width: 8rem; }
.group th { font-weight: 600; padding-top: .8rem; }
tbody:first-of-type .group th { padding-top: .45rem; }
tbody tr:not(.group):hover > * { background: var(--soft); }
sup { font-size: .72em; line-height: 0; }
.words td, .words tbody th { overflow-wrap: break-word; }
.privacy { width: 100%; }
.privacy caption { caption-side: top; padding: 0 0 .35rem; opacity: 1; font-size: .95rem; }
.privacy tbody { border-top: .75px solid var(--rule); }
.privacy tbody th { width: 9rem; font-weight: 600; }
.privacy tbody td:first-child { padding-left: .9rem; }
.privacy tbody:hover, .privacy tbody tr:hover > * { background: none !important; }
.evidence { width: 17rem; font-style: italic; }
.audit, .defences { width: 100%; }
.audit caption { caption-side: top; padding: 0 0 .35rem; opacity: 1; font-size: .95rem; }
.audit tbody th { width: 17rem; overflow-wrap: anywhere; }
.audit th.n, .audit td.n { padding-left: .3rem; }
.audit small { font-size: .8rem; opacity: .78; }
.verdict { font-weight: 600; padding: 0 .4em; border: 1.5px solid currentColor; border-radius: .2em; }
.verdict.succeeded { color: var(--paper); background: var(--alarm); border-color: var(--alarm); }
.verdict.failed { border-style: dashed; border-color: var(--faint); font-weight: 400; }
.leak { color: var(--alarm); }
.held { font-style: italic; }
.rows { border-left: 3px solid var(--alarm); padding-left: .7rem; }
.not-run ul { max-width: none; padding-left: 1.2rem; }
.pictures img { display: block; width: auto; max-width: 100%; height: 7rem; object-fit: contain;
  object-position: left; image-rendering: pixelated; margin-bottom: .3rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: .3rem; }
details { border-top: .75px solid var(--rule); padding: .35rem 0; max-width: 44rem; }
details:last-of-type { border-bottom: .75px solid var(--rule); }
summary { cursor: pointer; }
summary:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
pre, code { font: .84rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
pre { background: var(--soft); padding: .7rem .9rem; overflow-x: auto; }
@media (max-width: 44rem) {
  main { padding: 1.5rem 1rem 3rem; }
  .privacy { min-width: 36rem; }
  .privacy tbody th { width: 6rem; }
  .evidence { width: 10rem; }
  .audit, .defences { min-width: 44rem; }
}
@media print {
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  tr, .banner, pre { break-inside: avoid; }
  .verdict.succeeded { color: var(--alarm); background: none; border-width: 2.5px; }
  .wide { overflow: visible; }
  pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; display: block; height: auto; }
}
"""
